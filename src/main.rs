//! fabscope, the command.
fn main() {}
