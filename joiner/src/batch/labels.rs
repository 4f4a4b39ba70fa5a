//! What a pair of runs is labelled with: all that its manifests say of where and how it was recorded, and the user's own
//! labels. Each becomes a column of the table and can be grouped by.

use crate::describe::{utc, wall_clock};
use run_format::{Kind, Manifest, Side, Transport};
use std::collections::{BTreeMap, BTreeSet};

/// Labels by name.
pub type Labels = BTreeMap<String, String>;

/// Names begin with this where the user chose them.
pub(crate) const OWN: &str = "label.";

/// The labels of a pair, or of one side's run alone.
pub(crate) fn labels(host: Option<&Manifest>, target: Option<&Manifest>, transports: &[Transport]) -> Labels {
    let mut labels = Labels::new();
    let both = [(Side::Host, host), (Side::Target, target)];
    let runs = || both.iter().filter_map(|(side, run)| Some((*side, (*run)?)));
    for (side, m) in runs() {
        let mut put = |name: &str, value: String| {
            if !value.is_empty() {
                labels.insert(format!("{side}.{name}"), value);
            }
        };
        put("kind", m.kind.to_string());
        put("software", m.software.name.clone());
        put("version", m.software.version.clone());
        put("build_id", m.software.build_id.clone().unwrap_or_default());
        put("machine", m.machine.hostname.clone());
        put("kernel", m.machine.kernel.clone());
        put("kernel_build", m.machine.kernel_build.clone());
        put("architecture", m.machine.architecture.clone());
        put("cpus", m.machine.cpus.to_string());
        put("tool", m.tool.clone());
        put("detail", m.detail.clone());
        put("sampling", m.one_in.max(1).to_string());
        put("source", source(m));
        let state = if m.state == run_format::State::Closed { "closed" } else { "open" };
        put("state", state.to_owned());
        if let Some(windows) = m.windows {
            put(
                "window",
                format!("{}/{}", run_format::Nanos(windows.length_ns), run_format::Nanos(windows.every_ns)),
            );
        }
        if let Some(workload) = &m.workload {
            put("workload", workload.argv.join(" "));
        }
    }
    // What is asked for most has a name that is the same whichever side says it.
    let mut merged = |name: &str, values: Vec<String>| {
        let value = joined(values);
        if !value.is_empty() {
            labels.insert(name.to_owned(), value);
        }
    };
    let of = |read: fn(&Manifest) -> String| -> Vec<String> { runs().map(|(_, m)| read(m)).collect() };
    merged("machine", of(|m| m.machine.hostname.clone()));
    merged("kernel", of(|m| m.machine.kernel.clone()));
    merged("build_id", of(|m| m.software.build_id.clone().unwrap_or_default()));
    merged("sampling", of(|m| m.one_in.max(1).to_string()));
    merged("source", of(source));
    merged("tool", of(|m| m.tool.clone()));
    let spdk = |m: &&Manifest| m.kind == Kind::Spdk;
    merged(
        "spdk.version",
        target.filter(spdk).or(host.filter(spdk)).map(|m| m.software.version.clone()).into_iter().collect(),
    );
    let names: BTreeSet<&str> = transports.iter().map(|t| t.name()).collect();
    merged("transport", names.into_iter().map(str::to_owned).collect());
    if let Some((start, _)) = host.or(target).and_then(wall_clock) {
        let date = utc(start);
        merged("day", vec![date.split(' ').next().unwrap_or_default().to_owned()]);
    }
    let own: BTreeSet<&String> = runs().flat_map(|(_, m)| m.labels.keys()).collect();
    for name in own {
        let values = runs().filter_map(|(_, m)| m.labels.get(name).cloned()).collect();
        merged(&format!("{OWN}{name}"), values);
    }
    labels
}

/// One value where all agree; else each side's, the host's first.
fn joined(values: Vec<String>) -> String {
    let mut different: Vec<String> = Vec::new();
    for value in values.into_iter().filter(|v| !v.is_empty()) {
        if !different.contains(&value) {
            different.push(value);
        }
    }
    different.join(" / ")
}

/// What a run's boundaries were taken with: `fentry`, `uprobe`, `trace ring`, ...
fn source(m: &Manifest) -> String {
    let kinds: BTreeSet<&str> = m
        .hooks
        .iter()
        .filter_map(|hook| hook.hook.as_deref())
        .filter_map(|hook| hook.split([' ', '+']).next())
        .collect();
    kinds.into_iter().collect::<Vec<_>>().join("+")
}

#[cfg(test)]
mod tests {
    use super::labels;
    use crate::synthetic::Load;
    use run_format::Transport;

    #[test]
    fn both_sides_are_told_and_what_they_share_has_one_name() {
        let mut runs = Load { commands: 10, ..Load::default() }.record();
        for (side, build) in [(&mut runs.host, "a"), (&mut runs.target, "b")] {
            side.manifest.labels.insert("load".into(), "fio".into());
            side.manifest.labels.insert("build".into(), build.into());
        }
        let of =
            labels(Some(&runs.host.manifest), Some(&runs.target.manifest), &[Transport::Tcp, Transport::Tcp]);
        for (name, value) in [
            ("spdk.version", "26.05"),
            ("kernel", "6.12.30"),
            ("machine", "initiator / storage"),
            ("host.machine", "initiator"),
            ("target.kind", "spdk"),
            ("transport", "tcp"),
            ("sampling", "1"),
            ("label.load", "fio"),
            ("label.build", "a / b"),
            ("day", "2026-09-21"),
        ] {
            assert_eq!(of.get(name).map(String::as_str), Some(value), "{name}: {of:?}");
        }
        let alone = labels(None, Some(&runs.target.manifest), &[]);
        assert!(!alone.contains_key("host.kernel") && !alone.contains_key("transport"), "{alone:?}");
    }
}
