//! The README says what the code says.

use run_format::Side;
use run_format::columns::{self, Column};

/// The README's table of columns, as the code has them.
fn columns_table() -> String {
    let mut text = String::new();
    let mut section = |title: &str, columns: &[Column]| {
        text += &format!("\n{title}\n\n| column | type | unit | what it is |\n|---|---|---|---|\n");
        for c in columns {
            let null = if c.nullable { " or null" } else { "" };
            let kind = format!("{:?}", c.kind).to_lowercase();
            text += &format!("| `{}` | {kind}{null} | {} | {} |\n", c.name, c.unit, c.meaning);
        }
    };
    section("`commands/*.parquet` of a host:", &columns::commands(Side::Host));
    let target: Vec<Column> = columns::commands(Side::Target)
        .into_iter()
        .filter(|c| !columns::commands(Side::Host).contains(c))
        .collect();
    section("`commands/*.parquet` of a target, where it differs:", &target);
    section("`queues/*.parquet`:", columns::QUEUES);
    text.push('\n');
    text
}

#[test]
fn the_column_list_is_that_of_the_code() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/README.md");
    let readme = std::fs::read_to_string(path).unwrap();
    let start = readme.find("<!-- columns:").unwrap();
    let start = start + readme[start..].find("-->\n").unwrap() + 4;
    let end = readme.find("<!-- /columns -->").unwrap();
    let table = columns_table();
    if std::env::var_os("FABSCOPE_REWRITE").is_some() {
        std::fs::write(path, format!("{}{table}{}", &readme[..start], &readme[end..])).unwrap();
        return;
    }
    assert_eq!(&readme[start..end], table, "FABSCOPE_REWRITE=1 cargo test --test readme mends it");
}
