#!/usr/bin/env python3
"""Holds fabscope's join and report against DuckDB doing the same over the same Parquet files, in turn.

    pip install duckdb
    cargo run --release -p joiner --example generate -- --commands 10000000 DIR
    cargo build --release -p joiner --example report
    joiner/benches/against_duckdb.py DIR/host.run DIR/target.run target/release/examples/report

Both join the two runs by queue, cid, opcode, nsid, slba and nlb with the target's interval inside the host's, split
the latency into the five stages and give per operation and size the number of commands, the means and four
percentiles of latency and stages. DuckDB is told the clock offset, which fabscope finds, and neither checks that the
match is one to one nor accounts for what it leaves out; its percentiles are exact (`--approximate` lets it estimate
them). Both may use the same processors; time is from start to end of the process, memory the most that was resident.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

STAGES = {
    "latency": "h_end - h_queued",
    "host_block": "(h_driver - h_queued) + (h_end - h_done)",
    "host_driver": "(h_sent - h_driver) + (h_done - h_recv) + answer",
    "network": "(h_recv - h_sent) - answer - ((t_sent - t_recv) - wait)",
    "target_driver": "(t_submit - t_recv) - wait + (t_sent - t_done)",
    "storage": "t_done - t_submit",
}


def query(host, target, offset, slack, approximate):
    """The join and the report in SQL. `offset`: host time less target time, ns, right to within `slack`."""
    quantile = "approx_quantile" if approximate else "quantile_disc"
    figures = ", ".join(
        f"avg({name}) AS {name}_mean, {quantile}({name}, [0.5, 0.9, 0.99, 0.999]) AS {name}" for name in STAGES
    )
    stages = ", ".join(f"{formula} AS {name}" for name, formula in STAGES.items())
    return f"""
    WITH queues AS (
        SELECT h.queue AS host_queue, t.queue AS target_queue
        FROM '{host}/queues/*.parquet' h JOIN '{target}/queues/*.parquet' t
        USING (subsystem_nqn, host_nqn, cntlid, qid, host_port)
    ), pairs AS (
        SELECT h.opcode, h.bytes, h.status <> 0 AS error,
            h_queued, h_driver, h_sent, h_recv, h_done, h_end, t_recv, t_submit, t_done, t_sent,
            coalesce(t_data - t_r2t, 0) AS wait,
            CASE WHEN t_data IS NULL THEN 0 ELSE coalesce(h_r2t_turnaround, h_data_sent - h_r2t, 0) END AS answer
        FROM '{host}/commands/*.parquet' h
        JOIN queues q ON q.host_queue = h.queue
        JOIN '{target}/commands/*.parquet' t ON t.queue = q.target_queue
            AND t.cid = h.cid AND t.opcode = h.opcode AND t.nsid = h.nsid AND t.slba = h.slba AND t.nlb = h.nlb
        WHERE h_sent <= t_recv + {offset} + {slack} AND t_sent + {offset} <= h_recv + {slack}
    ), staged AS (SELECT opcode, bytes, error, {stages} FROM pairs)
    SELECT opcode, bytes, error, count(*) AS commands, {figures}
    FROM staged GROUP BY ALL ORDER BY ALL
    """


def once(options):
    """One join and report by DuckDB."""
    import duckdb

    connection = duckdb.connect()
    connection.execute(f"SET threads = {options.threads}")
    if options.spill:
        connection.execute(f"SET temp_directory = '{options.spill}'")
    sql = query(options.host, options.target, options.offset, options.slack, options.approximate)
    result = connection.execute(sql)
    names = [column[0] for column in result.description]
    for row in result.fetchall():
        print(dict(zip(names, row)))


def run(command):
    """Runs a command; seconds, processor seconds, MiB at most resident, and what it printed."""
    began = time.monotonic()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    printed = child.stdout.read().decode()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {child.returncode}")
    took = time.monotonic() - began
    return took, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, printed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("host")
    parser.add_argument("target")
    parser.add_argument("report", nargs="?", help="the example `report`, built in release")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--offset", type=int, default=86_000_000_000_000, help="of the synthetic runs, ns")
    parser.add_argument("--slack", type=int, default=100_000, help="for the synthetic runs' drift, ns")
    parser.add_argument("--approximate", action="store_true", help="let DuckDB estimate percentiles")
    parser.add_argument("--spill", help="a directory that DuckDB may use for what does not fit into memory")
    parser.add_argument("--memory", type=int, default=2048, help="what fabscope may take, MiB")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        return once(options)
    if not options.report:
        parser.error("the example `report` is needed")
    duck = [sys.executable, *sys.argv, "--once"]
    ours = [options.report, options.host, options.target, f"memory={options.memory}"]
    rounds = []
    for n in range(options.pairs):
        # Whoever comes second finds the files in memory too: the first round's reading is not counted.
        if n == 0:
            print(run(ours)[3], run(duck)[3], sep="\n")
        order = [("fabscope", ours), ("DuckDB", duck)]
        measured = {name: run(command)[:3] for name, command in (order if n % 2 == 0 else order[::-1])}
        rounds.append(measured)
        shown = ", ".join(f"{name} {m[0]:.2f} s ({m[1]:.2f} s CPU, {m[2]:.0f} MiB)" for name, m in measured.items())
        print(f"round {n + 1}: {shown}", flush=True)
    print("\n| | clock, median | least | CPU, median | most memory |\n|---|---|---|---|---|")
    for name in ("fabscope", "DuckDB"):
        clock, cpu, memory = zip(*(measured[name] for measured in rounds))
        print(
            f"| {name} | {statistics.median(clock):.2f} s | {min(clock):.2f} s "
            f"| {statistics.median(cpu):.2f} s | {max(memory):.0f} MiB |"
        )
    ratios = [measured["fabscope"][0] / measured["DuckDB"][0] for measured in rounds]
    print(f"\nfabscope takes {statistics.median(ratios):.2f} of DuckDB's time (median of {len(ratios)} pairs)")


if __name__ == "__main__":
    main()
