//! Chooses the kernel modules that the VM carries: those that are named here and what they depend on,
//! by what the modules themselves say. It does not load them; `modprobe` in the VM does.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use object::{Object, ObjectSection};

/// Modules that a kernel must have, built in or not.
pub(crate) const NEEDED: &[&str] = &[
    "virtio_pci",
    "virtio_console",
    "virtio_net",
    "nvme_fabrics",
    "nvme_tcp",
    "nvmet",
    "nvmet_tcp",
    "null_blk",
    "loop",
    "veth",
    "sch_netem",
];

/// Modules that are carried where a kernel has them.
pub(crate) const WANTED: &[&str] = &[
    "nvme",
    "nvme_rdma",
    "nvme_loop",
    "nvmet_rdma",
    "rdma_rxe",
    "rdma_ucm",
    "ib_uverbs",
    "brd",
    "dm_mod",
    "dm_delay",
    "virtio_blk",
    "ifb",
    "dummy",
    "tls",
    "inet_diag",
    "tcp_diag",
    "sch_tbf",
    "sch_prio",
    "act_mirred",
    "cls_u32",
    "cls_matchall",
    "ext4",
    // Algorithms that others ask for by name when they are already running.
    "crc32c_generic",
    "crc32c_intel",
    "crc32_generic",
    "crc32_pclmul",
    "crc_t10dif",
    "crct10dif_pclmul",
    "crc64_rocksoft",
    "crc64_rocksoft_generic",
    "libcrc32c",
];

/// The modules' files under one kernel's folder, by name.
#[derive(Debug)]
pub(crate) struct Tree {
    files: BTreeMap<String, PathBuf>,
    builtin: BTreeSet<String>,
}

/// One module as it goes into the VM.
#[derive(Debug)]
pub(crate) struct Module {
    pub(crate) content: Vec<u8>,
    /// What it needs, directly.
    pub(crate) depends: Vec<String>,
    pub(crate) aliases: Vec<String>,
}

impl Tree {
    /// Looks through `folder` (`.../lib/modules/RELEASE`).
    pub(crate) fn scan(folder: &Path) -> Result<Self> {
        let mut files = BTreeMap::new();
        let mut open = vec![folder.to_owned()];
        while let Some(folder) = open.pop() {
            for entry in fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
                let entry = entry?;
                let path = entry.path();
                if entry.file_type()?.is_dir() {
                    open.push(path);
                } else if let Some(name) = module_name(&path) {
                    files.insert(name, path);
                }
            }
        }
        let list = folder.join("modules.builtin");
        let builtin = match fs::read_to_string(&list) {
            Ok(text) => text.lines().filter_map(|line| module_name(Path::new(line))).collect(),
            Err(error) => return Err(error).with_context(|| list.display().to_string()),
        };
        Ok(Self { files, builtin })
    }

    /// The text of `modules.builtin`, by which `modprobe` knows that there is nothing to load.
    pub(crate) fn builtin_file(&self) -> String {
        self.builtin.iter().map(|name| format!("kernel/{name}.ko\n")).collect()
    }

    /// The named modules and all that they depend on.
    pub(crate) fn closure(&self) -> Result<BTreeMap<String, Module>> {
        let mut modules = BTreeMap::new();
        let mut open: Vec<String> = Vec::new();
        for name in NEEDED {
            if self.files.contains_key(*name) {
                open.push((*name).to_owned());
            } else if !self.builtin.contains(*name) {
                bail!("the kernel's packages hold no module {name}, and it is not built in");
            }
        }
        open.extend(WANTED.iter().filter(|n| self.files.contains_key(**n)).map(|n| (*n).to_owned()));
        while let Some(name) = open.pop() {
            if modules.contains_key(&name) {
                continue;
            }
            let Some(path) = self.files.get(&name) else {
                // Built in, or a soft dependency that this kernel does not have.
                continue;
            };
            let content = read_module(path)?;
            let mut module = parse(content).with_context(|| path.display().to_string())?;
            module.depends.retain(|name| self.files.contains_key(name));
            open.extend(module.depends.iter().cloned());
            modules.insert(name, module);
        }
        Ok(modules)
    }
}

/// The text of `modules.dep` for modules that all lie beside it as `NAME.ko`. Each line lists
/// everything a module needs, in the reverse of the order of loading, as `modprobe` expects.
pub(crate) fn dep_file(modules: &BTreeMap<String, Module>) -> String {
    let mut out = String::new();
    for name in modules.keys() {
        let mut order = Vec::new();
        load_order(name, modules, &mut order, &mut BTreeSet::new());
        order.pop();
        out.push_str(&format!("{name}.ko:"));
        for needed in order.iter().rev() {
            out.push_str(&format!(" {needed}.ko"));
        }
        out.push('\n');
    }
    out
}

/// The text of `modules.alias`, by which the kernel asks for an algorithm or a driver.
pub(crate) fn alias_file(modules: &BTreeMap<String, Module>) -> String {
    let mut out = String::new();
    for (name, module) in modules {
        for alias in &module.aliases {
            out.push_str(&format!("alias {alias} {name}\n"));
        }
    }
    out
}

fn load_order(
    name: &str,
    modules: &BTreeMap<String, Module>,
    order: &mut Vec<String>,
    seen: &mut BTreeSet<String>,
) {
    if !seen.insert(name.to_owned()) {
        return;
    }
    if let Some(module) = modules.get(name) {
        for needed in &module.depends {
            load_order(needed, modules, order, seen);
        }
        order.push(name.to_owned());
    }
}

/// `nvme-tcp.ko.xz` is module `nvme_tcp`; other files are none.
fn module_name(path: &Path) -> Option<String> {
    let file = path.file_name()?.to_str()?;
    let stem = [".ko", ".ko.xz", ".ko.zst", ".ko.gz"].iter().find_map(|e| file.strip_suffix(e))?;
    Some(stem.replace('-', "_"))
}

fn read_module(path: &Path) -> Result<Vec<u8>> {
    let program = match path.extension().and_then(|e| e.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        Some("gz") => "gzip",
        _ => return fs::read(path).with_context(|| path.display().to_string()),
    };
    let output = Command::new(program)
        .arg("-dc")
        .arg(path)
        .output()
        .with_context(|| format!("{program}, needed to unpack {}", path.display()))?;
    if !output.status.success() {
        bail!("{program} -dc {}: {}", path.display(), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(output.stdout)
}

/// Reads what a module says about itself in its `.modinfo` section.
fn parse(content: Vec<u8>) -> Result<Module> {
    let mut depends = Vec::new();
    let mut aliases = Vec::new();
    {
        let elf = object::File::parse(content.as_slice()).context("not an ELF file")?;
        let info = elf.section_by_name(".modinfo").context("no .modinfo section")?;
        for field in info.data().context(".modinfo")?.split(|byte| *byte == 0) {
            let Ok(field) = std::str::from_utf8(field) else { continue };
            let Some((key, value)) = field.split_once('=') else { continue };
            match key {
                "depends" => {
                    let names = value.split(',').filter(|name| !name.is_empty());
                    depends.extend(names.map(|name| name.replace('-', "_")));
                }
                "softdep" => depends.extend(soft_before(value)),
                "alias" => aliases.push(value.to_owned()),
                _ => {}
            }
        }
    }
    Ok(Module { content, depends, aliases })
}

/// The modules that a soft dependency (`pre: a b post: c`) wants loaded first.
fn soft_before(value: &str) -> Vec<String> {
    let mut before = false;
    let mut out = Vec::new();
    for word in value.split_whitespace() {
        match word {
            "pre:" => before = true,
            "post:" => before = false,
            name if before => out.push(name.replace('-', "_")),
            _ => {}
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn module(depends: &[&str]) -> Module {
        Module {
            content: Vec::new(),
            depends: depends.iter().map(|d| (*d).to_owned()).collect(),
            aliases: vec![],
        }
    }

    #[test]
    fn dep_file_lists_the_last_to_load_first() {
        let modules = BTreeMap::from([
            ("core".to_owned(), module(&[])),
            ("fabrics".to_owned(), module(&["core"])),
            ("tcp".to_owned(), module(&["core", "fabrics"])),
            // A circle, as soft dependencies can make one, must not hang.
            ("x".to_owned(), module(&["y"])),
            ("y".to_owned(), module(&["x"])),
        ]);
        assert_eq!(
            dep_file(&modules),
            "core.ko:\nfabrics.ko: core.ko\ntcp.ko: fabrics.ko core.ko\nx.ko: y.ko\ny.ko: x.ko\n"
        );
    }

    #[test]
    fn names_and_soft_dependencies() {
        assert_eq!(module_name(Path::new("a/nvme-tcp.ko.xz")).as_deref(), Some("nvme_tcp"));
        assert_eq!(module_name(Path::new("loop.ko")).as_deref(), Some("loop"));
        assert_eq!(module_name(Path::new("modules.dep")), None);
        assert_eq!(soft_before("pre: crc32c a-b post: z pre: q"), ["crc32c", "a_b", "q"]);
        assert!(parse(b"junk".to_vec()).is_err());
    }
}
