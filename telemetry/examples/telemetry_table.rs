//! Prints the tables of `docs/telemetry.md`: `cargo run -p telemetry --example telemetry_table`.

fn main() {
    print!("{}", telemetry::table());
}
