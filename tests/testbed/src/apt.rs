//! Fetches packages of another Debian suite with the machine's own `apt-get`, from the machine's own
//! sources with the suite's name changed. Its lists live in a folder of their own: the machine's
//! lists, caches and installed packages stay untouched.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// Names that stand for a Debian suite in a source list.
const SUITES: &[&str] = &[
    "bullseye",
    "bookworm",
    "trixie",
    "forky",
    "duke",
    "sid",
    "oldoldstable",
    "oldstable",
    "stable",
    "testing",
    "unstable",
];

/// A folder with the lists of one suite.
#[derive(Debug)]
pub(crate) struct Suite {
    name: String,
    folder: PathBuf,
    update_said: String,
}

impl Suite {
    /// Reads the machine's sources from `etc_apt`, rewrites them for `name` into `folder` and updates
    /// the lists there.
    pub(crate) fn update(name: &str, folder: &Path, etc_apt: &Path) -> Result<Self> {
        let sources = folder.join("sources");
        fs::create_dir_all(&sources)?;
        fs::create_dir_all(folder.join("lists/partial"))?;
        fs::create_dir_all(folder.join("archives/partial"))?;
        let mut written = 0;
        for path in source_files(etc_apt)? {
            let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            let (rewritten, extension) = if path.extension().is_some_and(|e| e == "sources") {
                (rewrite_stanzas(&text, name), "sources")
            } else {
                (rewrite_lines(&text, name), "list")
            };
            if !rewritten.is_empty() {
                written += 1;
                fs::write(sources.join(format!("{written}.{extension}")), rewritten)?;
            }
        }
        if written == 0 {
            bail!(
                "no source list in {} names a Debian suite with component main; \
                 add one there, the test bed changes only the suite's name",
                etc_apt.display()
            );
        }
        let mut suite = Self { name: name.to_owned(), folder: folder.to_owned(), update_said: String::new() };
        let output = suite.apt("apt-get").arg("update").output().context("apt-get update")?;
        // One source of several may fail and the wanted package still be had from another; whether
        // it is shows when it is asked for.
        suite.update_said =
            format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        Ok(suite)
    }

    /// What the newest version of `package` depends on: the names alone, alternatives left out.
    pub(crate) fn depends(&self, package: &str) -> Result<Vec<String>> {
        let output = self
            .apt("apt-cache")
            .args(["show", "--no-all-versions", package])
            .output()
            .context("apt-cache show")?;
        let text = String::from_utf8_lossy(&output.stdout);
        if !output.status.success() || text.trim().is_empty() {
            let trouble: Vec<&str> = self
                .update_said
                .lines()
                .filter(|line| ["E:", "W:", "Err:"].iter().any(|mark| line.starts_with(mark)))
                .take(6)
                .collect();
            bail!(
                "suite {} has no package {package} that this machine can reach. apt-get update said: {}. \
                 Check that the package registry answers (apt-get update), or copy a filled \
                 cache folder from another machine and name it in {}",
                self.name,
                if trouble.is_empty() { "nothing of note".to_owned() } else { trouble.join("; ") },
                crate::CACHE_VARIABLE,
            );
        }
        Ok(depends_of(&text))
    }

    /// Downloads packages into `into` and returns the files.
    pub(crate) fn download(&self, packages: &[String], into: &Path) -> Result<Vec<PathBuf>> {
        fs::create_dir_all(into)?;
        let output = self
            .apt("apt-get")
            .arg("download")
            .args(packages)
            .current_dir(into)
            .output()
            .context("apt-get download")?;
        if !output.status.success() {
            bail!(
                "apt-get download {} (suite {}) failed: {}. Try again; when the package is gone from \
                 the registry, the lists were older than it",
                packages.join(" "),
                self.name,
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        let mut files = Vec::new();
        for entry in fs::read_dir(into)? {
            let path = entry?.path();
            if path.extension().is_some_and(|e| e == "deb") {
                files.push(path);
            }
        }
        Ok(files)
    }

    fn apt(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("LC_ALL", "C").env("DEBIAN_FRONTEND", "noninteractive");
        let folder = self.folder.display();
        for option in [
            format!("Dir::State::lists={folder}/lists"),
            format!("Dir::Cache={folder}"),
            format!("Dir::Etc::sourceparts={folder}/sources"),
            "Dir::State::status=/dev/null".to_owned(),
            "Dir::Etc::sourcelist=/dev/null".to_owned(),
            "Dir::Etc::preferences=/dev/null".to_owned(),
            "Dir::Etc::preferencesparts=/dev/null".to_owned(),
            "APT::Architecture=amd64".to_owned(),
            "APT::Architectures=amd64".to_owned(),
            // The folder belongs to whoever runs the tests, not to apt's own user.
            "APT::Sandbox::User=root".to_owned(),
            "Acquire::Languages=none".to_owned(),
            "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false".to_owned(),
            "Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled=false".to_owned(),
            "Acquire::Retries=3".to_owned(),
            "Acquire::http::Timeout=30".to_owned(),
        ] {
            command.arg("-o").arg(option);
        }
        command
    }
}

fn source_files(etc_apt: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let list = etc_apt.join("sources.list");
    if list.is_file() {
        files.push(list);
    }
    let parts = etc_apt.join("sources.list.d");
    if parts.is_dir() {
        for entry in fs::read_dir(&parts).with_context(|| parts.display().to_string())? {
            let path = entry?.path();
            if path.extension().is_some_and(|e| e == "list" || e == "sources") {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

/// A suite's name for `target`, or none where it is not a Debian suite or `target` has no such part.
fn rename_suite(suite: &str, target: &str) -> Option<String> {
    let (base, part) = match suite.split_once('-') {
        Some((base, part)) => (base, Some(part)),
        None => (suite, None),
    };
    if !SUITES.contains(&base) {
        return None;
    }
    match part {
        None => Some(target.to_owned()),
        // sid gets its security fixes and updates as ordinary packages.
        Some("security" | "updates") if target == "sid" => None,
        Some(part @ ("security" | "updates")) => Some(format!("{target}-{part}")),
        Some(_) => None,
    }
}

/// Rewrites a source list of one line per source.
fn rewrite_lines(text: &str, target: &str) -> String {
    let mut out = String::new();
    for line in text.lines() {
        let line = line.split('#').next().unwrap_or_default().trim();
        let Some(rest) = line.strip_prefix("deb").filter(|r| r.starts_with([' ', '\t'])) else {
            continue;
        };
        let rest = rest.trim_start();
        let (options, rest) = match rest.strip_prefix('[').and_then(|r| r.split_once(']')) {
            Some((options, rest)) => (format!("[{options}] "), rest),
            None => (String::new(), rest),
        };
        let mut words = rest.split_whitespace();
        let (Some(uri), Some(suite)) = (words.next(), words.next()) else { continue };
        if !words.any(|component| component == "main") {
            continue;
        }
        if let Some(suite) = rename_suite(suite, target) {
            out.push_str(&format!("deb {options}{uri} {suite} main\n"));
        }
    }
    out
}

/// Rewrites a source list of stanzas (deb822).
fn rewrite_stanzas(text: &str, target: &str) -> String {
    let mut out = Vec::new();
    let mut stanza: Vec<(String, String)> = Vec::new();
    for line in text.lines().chain([""]) {
        if line.starts_with('#') {
            continue;
        }
        if line.trim().is_empty() {
            out.extend(rewrite_stanza(&stanza, target));
            stanza.clear();
        } else if line.starts_with([' ', '\t']) {
            if let Some((_, value)) = stanza.last_mut() {
                value.push('\n');
                value.push_str(line);
            }
        } else if let Some((name, value)) = line.split_once(':') {
            stanza.push((name.trim().to_owned(), value.trim().to_owned()));
        }
    }
    out.join("\n")
}

fn rewrite_stanza(stanza: &[(String, String)], target: &str) -> Option<String> {
    let field = |wanted: &str| {
        stanza.iter().find(|(name, _)| name.eq_ignore_ascii_case(wanted)).map(|(_, v)| v.as_str())
    };
    let has = |wanted: &str, word: &str| {
        field(wanted).is_some_and(|value| value.split_whitespace().any(|w| w == word))
    };
    if has("Enabled", "no") || !has("Types", "deb") || !has("Components", "main") {
        return None;
    }
    let mut suites: Vec<String> =
        field("Suites")?.split_whitespace().filter_map(|suite| rename_suite(suite, target)).collect();
    suites.dedup();
    if suites.is_empty() {
        return None;
    }
    let mut out = format!("Types: deb\nSuites: {}\nComponents: main\n", suites.join(" "));
    for (name, value) in stanza {
        if !["types", "suites", "components", "enabled"].contains(&name.to_lowercase().as_str()) {
            out.push_str(&format!("{name}: {value}\n"));
        }
    }
    Some(out)
}

/// The names in the `Depends` field of a package's record, alternatives left out.
fn depends_of(record: &str) -> Vec<String> {
    record
        .lines()
        .find_map(|line| line.strip_prefix("Depends:"))
        .map(|depends| {
            depends
                .split(',')
                .filter(|entry| !entry.contains('|'))
                .filter_map(|entry| entry.split_whitespace().next())
                .map(str::to_owned)
                .collect()
        })
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stanzas_change_their_suite_and_keep_the_rest() {
        let text = "# a comment\nTypes: deb deb-src\nURIs: http://example.org/debian\n\
            Suites: bookworm bookworm-updates\nComponents: main contrib\n\
            Signed-By:\n -----BEGIN\n .\n -----END\n\n\
            Types: deb\nURIs: http://example.org/security\nSuites: bookworm-security\nComponents: main\n\n\
            Types: deb\nURIs: http://example.org/other\nSuites: nodistro\nComponents: main\n\n\
            Types: deb\nEnabled: no\nURIs: http://example.org/off\nSuites: bookworm\nComponents: main\n";
        assert_eq!(
            rewrite_stanzas(text, "trixie"),
            "Types: deb\nSuites: trixie trixie-updates\nComponents: main\n\
             URIs: http://example.org/debian\nSigned-By: \n -----BEGIN\n .\n -----END\n\n\
             Types: deb\nSuites: trixie-security\nComponents: main\nURIs: http://example.org/security\n"
        );
        assert_eq!(
            rewrite_stanzas(text, "sid").matches("Types:").count(),
            1,
            "sid has neither a security nor an updates suite"
        );
    }

    #[test]
    fn lines_change_their_suite_and_third_parties_are_left_out() {
        let text = "deb [signed-by=/k.gpg arch=amd64] http://example.org/debian trixie main contrib # x\n\
            deb-src http://example.org/debian trixie main\n\
            deb http://example.org/security stable-security main\n\
            deb http://example.org/containers bookworm stable\n\
            deb http://example.org/db bookworm-pgdg main\n\
            #deb http://example.org/off bookworm main\n\
            debris\ndeb\ndeb [x\n";
        assert_eq!(
            rewrite_lines(text, "bookworm"),
            "deb [signed-by=/k.gpg arch=amd64] http://example.org/debian bookworm main\n\
             deb http://example.org/security bookworm-security main\n"
        );
    }

    #[test]
    fn a_registry_that_does_not_answer_is_named_with_the_way_out() {
        let folder = tempfile::tempdir().unwrap();
        let etc = folder.path().join("etc");
        fs::create_dir_all(&etc).unwrap();
        let error = Suite::update("trixie", &folder.path().join("none"), &etc).unwrap_err();
        assert!(error.to_string().contains("no source list"), "{error:#}");

        fs::write(etc.join("sources.list"), "deb [trusted=yes] file:/nonexistent bookworm main\n").unwrap();
        let suite = Suite::update("trixie", &folder.path().join("state"), &etc).unwrap();
        let error = suite.depends("linux-image-amd64").unwrap_err().to_string();
        assert!(error.contains("trixie") && error.contains("/nonexistent"), "{error}");
        assert!(error.contains(crate::CACHE_VARIABLE), "{error}");
    }

    #[test]
    fn depends_names_packages_without_versions_and_alternatives() {
        let record = "Package: linux-image-x\nDepends: dracut | initramfs-tools (>= 0.120), \
            linux-binary-x (= 7.2), linux-modules-x (= 7.2)\n";
        assert_eq!(depends_of(record), ["linux-binary-x", "linux-modules-x"]);
        assert!(depends_of("Package: y\n").is_empty());
    }
}
