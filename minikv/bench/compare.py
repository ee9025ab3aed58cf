"""The comparison: several engines serve the same requests, in turns, and are put into one table."""

import contextlib
import statistics
import sys

from tqdm import tqdm

from minikv.bench import machine


def measure(chosen, settings, workload, rounds):
    """(kind, num_seqs) -> [(Run, cores that others kept busy), ...], one for each round; and
    (kind, num_seqs) -> the attention backend that ran, None where an engine has no such choice."""
    from minikv.bench import engines as E  # imports torch and transformers

    # A full batch each, so that no buffer grows and no kernel is first seen while it counts.
    warm_up = [item._replace(num_output_tokens=4) for item in workload[: max(n for _, n in chosen)]]
    runs = {key: [] for key in chosen}
    total = len(chosen) * (1 + rounds)
    with contextlib.ExitStack() as stack, tqdm(total=total, file=sys.stderr, unit="run") as bar:
        built = {}
        for kind, num_seqs in chosen:
            bar.set_description(f"loading {kind}-{num_seqs}")
            built[kind, num_seqs] = engine = E.KINDS[kind](settings, num_seqs)
            stack.callback(engine.close)
            engine.run(warm_up)
            bar.update()
        for i in range(rounds):
            for (kind, num_seqs), engine in built.items():
                bar.set_description(f"round {i + 1}: {kind}-{num_seqs}")
                with machine.Watch(getattr(engine, "pid", None)) as watch:
                    run = engine.run(workload)
                _check_lengths(f"{kind}-{num_seqs}", run, workload)
                if watch.busy:
                    bar.write(
                        f"warning: round {i + 1}, {kind}-{num_seqs}: other processes kept "
                        f"{watch.others:.1f} cores busy; this measurement is not worth much",
                        file=sys.stderr,
                    )
                runs[kind, num_seqs].append((run, watch.others))
                bar.update()
        backends = {key: getattr(e, "attention_backend", None) for key, e in built.items()}
    return runs, backends


def _check_lengths(name, run, workload):
    """An engine that makes fewer tokens than asked would look fast."""
    asked = [n for _, n in workload]
    wrong = [i for i, (n, made) in enumerate(zip(asked, run.num_tokens, strict=True)) if n != made]
    if wrong:
        raise RuntimeError(
            f"{name} made {run.num_tokens[wrong[0]]} tokens for request {wrong[0]}, which asked "
            f"for {asked[wrong[0]]} ({len(wrong)} of {len(asked)} requests are wrong)"
        )


def row_of(kind, num_seqs, dtype, measured, workload):
    useful = sum(n for _, n in workload)
    seconds = [run.seconds for run, _ in measured]
    rates = [useful / s for s in seconds]
    return {
        "engine": kind,
        "max_num_seqs": num_seqs,
        "dtype": dtype,
        "useful_tok_per_s": statistics.median(rates),
        "useful_tok_per_s_range": [min(rates), max(rates)],
        "seconds": statistics.median(seconds),
        "seconds_range": [min(seconds), max(seconds)],
        "steps": round(statistics.median(run.steps for run, _ in measured)),
        "peak_kv_bytes": measured[-1][0].peak_kv_bytes,
        "cores_busy_with_others": [others for _, others in measured],
    }


def print_head(workload, facts, spec):
    prompt_tokens, output_tokens = (sum(len(p) for p, _ in workload), sum(n for _, n in workload))
    print(
        f"{len(workload)} requests: {prompt_tokens} prompt tokens, {output_tokens} output tokens; "
        f"{spec.name}, {spec.dtype}\n"
        f"{facts['gpu'] or facts['cpu']}, {facts['threads']} threads; torch {facts['torch']}, "
        f"transformers {facts['transformers']}",
        flush=True,
    )


def print_table(rows):
    """Rates with their range over the rounds; x is the ratio to transformers' generate."""
    print(f"\n{'engine':15} {'seqs':>4} {'dtype':9} {'useful tok/s':>22} {'x':>5} ", end="")
    print(f"{'seconds':>8} {'steps':>6} {'peak KV MB':>11}")
    for row in rows:
        low, high = row["useful_tok_per_s_range"]
        rate = f"{row['useful_tok_per_s']:.1f} ({low:.1f}-{high:.1f})"
        ratio, peak = row["ratio_to_generate"], row["peak_kv_bytes"]
        print(
            f"{row['engine']:15} {row['max_num_seqs']:4} {row['dtype']:9} {rate:>22} "
            f"{f'{ratio:.2f}' if ratio else '-':>5} {row['seconds']:8.1f} {row['steps']:6} "
            f"{f'{peak / 1e6:.1f}' if peak is not None else '-':>11}"
        )
    print("\npeak KV: ", end="")
    print(
        "; ".join(f"{kind} {m}" for kind, m in {r["engine"]: r["peak_kv_is"] for r in rows}.items())
    )
    for backend in {row["attention_backend"] for row in rows} - {None}:
        print(f"minikv's attention backend: {backend}")


def rows_of(chosen, dtype, runs, backends, workload) -> list[dict]:
    """The comparison's rows, in the order of `chosen`."""
    from minikv.bench import engines as E

    rows = [row_of(*key, dtype, runs[key], workload) for key in chosen]
    base = next((row for row in rows if row["engine"] == "generate"), None)
    for row in rows:
        rate = row["useful_tok_per_s"]
        row["ratio_to_generate"] = rate / base["useful_tok_per_s"] if base else None
        row["peak_kv_is"] = E.KINDS[row["engine"]].kv_means
        row["attention_backend"] = backends[row["engine"], row["max_num_seqs"]]
    return rows
