//! Checks JSON against a schema, as far as this project's schemas go: `$ref`, `anyOf`, `oneOf`, `type`, `const`,
//! `enum`, `required`, `properties`, `additionalProperties`, `items`, `minItems`, `maxItems`, `minimum`. What a schema says beyond that is an error.

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

/// Words that say nothing of the value.
const SILENT: [&str; 5] = ["$schema", "$id", "$defs", "title", "description"];

/// Fails unless the value is what the schema says.
pub fn check(value: &Value, schema: &Value) -> Result<()> {
    fits(value, schema, schema)
}

fn fits(value: &Value, schema: &Value, root: &Value) -> Result<()> {
    for (word, what) in schema.as_object().context("a schema that is no object")? {
        match word.as_str() {
            "$ref" => {
                let name = what.as_str().and_then(|name| name.strip_prefix('#')).context("a $ref")?;
                let part = root.pointer(name).with_context(|| format!("no {name}"))?;
                fits(value, part, root)?;
            }
            "anyOf" => {
                let any = what.as_array().context("anyOf")?;
                ensure!(any.iter().any(|s| fits(value, s, root).is_ok()), "{value} is none of {what}");
            }
            "oneOf" => {
                let all = what.as_array().context("oneOf")?;
                let fitting = all.iter().filter(|s| fits(value, s, root).is_ok()).count();
                if fitting != 1 {
                    // What the first has to say of it: it is the one that is mostly meant.
                    let first = all.first().map_or(Ok(()), |s| fits(value, s, root));
                    bail!("{fitting} of {} fit, of the first: {first:?}", all.len());
                }
            }
            "type" => {
                let kinds = what.as_array().map_or(std::slice::from_ref(what), Vec::as_slice);
                let any = kinds.iter().map(|kind| is(value, kind)).collect::<Result<Vec<bool>>>()?;
                ensure!(any.contains(&true), "{value} is not of the type {what}");
            }
            "minItems" | "maxItems" => {
                let (n, limit) =
                    (value.as_array().map(Vec::len), what.as_u64().context("a number of items")?);
                let beyond =
                    |n: usize| if word == "minItems" { (n as u64) < limit } else { n as u64 > limit };
                ensure!(!n.is_some_and(beyond), "{n:?} items, and {word} is {limit}");
            }
            "const" => ensure!(value == what, "{value} is not {what}"),
            "enum" => {
                ensure!(
                    what.as_array().is_some_and(|all| all.contains(value)),
                    "{value} is not among {what}"
                );
            }
            "minimum" => {
                let below = value.as_f64().zip(what.as_f64()).is_some_and(|(v, least)| v < least);
                ensure!(!below, "{value} is below {what}");
            }
            "required" => {
                for name in what.as_array().context("required")? {
                    let name = name.as_str().context("required")?;
                    ensure!(!value.is_object() || value.get(name).is_some(), "{value} lacks {name}");
                }
            }
            "properties" => {
                for (name, part) in what.as_object().context("properties")? {
                    if let Some(inner) = value.get(name) {
                        fits(inner, part, root).with_context(|| name.clone())?;
                    }
                }
            }
            "additionalProperties" => {
                for (name, inner) in value.as_object().into_iter().flatten() {
                    if schema["properties"].get(name).is_some() {
                        continue;
                    }
                    ensure!(what.is_object(), "{name} is no property");
                    fits(inner, what, root).with_context(|| name.clone())?;
                }
            }
            "items" => {
                for inner in value.as_array().into_iter().flatten() {
                    fits(inner, what, root)?;
                }
            }
            silent if SILENT.contains(&silent) => {}
            other => bail!("{other} in a schema is not known here"),
        }
    }
    Ok(())
}

fn is(value: &Value, kind: &Value) -> Result<bool> {
    Ok(match kind.as_str().context("one type")? {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        other => bail!("type {other}"),
    })
}
