"""`python -m minikv generate "prompt"`: an answer, streaming."""

import argparse
import sys


def main(argv):
    parser = argparse.ArgumentParser(
        prog="python -m minikv generate",
        description="Answers a prompt with a language model, printing the text as it comes.",
        epilog='example: python -m minikv generate "Why is the sky blue?" --max-tokens 100',
    )
    parser.add_argument("prompt", help="what to ask; - reads it from standard input")
    parser.add_argument(
        "--model",
        default="smollm2",
        help="smollm2 (the default: SmolLM2-135M-Instruct), tiny (random weights, instant), a "
        "folder, or a Hugging Face id",
    )
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16, float16 or float32")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps")
    parser.add_argument("--max-tokens", type=int, default=256, help="default: 256")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 (default) takes the likeliest token"
    )
    parser.add_argument("--top-k", type=int, default=0, help="0 (default): all tokens")
    parser.add_argument("--top-p", type=float, default=1.0, help="1 (default): all tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop", action="append", default=[], help="end before this string")
    parser.add_argument(
        "--raw", action="store_true", help="continue the text as it is: no chat template"
    )
    parser.add_argument("--stats", action="store_true", help="print speed and memory at the end")
    args = parser.parse_args(argv)

    from minikv.request import SamplingParams  # after --help: importing torch takes seconds

    try:
        prompt = _read_prompt(args.prompt)
        params = SamplingParams(
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            stop=args.stop,
            seed=args.seed,
        )
        from minikv.engine import LLM

        llm = LLM(args.model, dtype=args.dtype, device=args.device)
        chat = not args.raw and llm.tokenizer is not None and llm.tokenizer.chat_template
        pieces = llm.stream([{"role": "user", "content": prompt}] if chat else prompt, params)
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
    except KeyboardInterrupt:
        print()
        return 130
    except (ValueError, TypeError, RuntimeError) as error:
        print(f"minikv generate: {error}", file=sys.stderr)
        return 1
    if args.stats:
        steps = llm.metrics.steps
        ttft, total = steps[0].end - steps[0].start, steps[-1].end - steps[0].start
        num_tokens = sum(step.num_tokens for step in steps)
        peak = max(step.num_blocks_in_use for step in steps) * llm.manager.block_size
        kv_bytes = peak * llm.spec.kv_bytes_per_token
        print(
            f"[{len(steps)} steps in {total:.2f} s, the first in {ttft:.2f} s; {num_tokens} tokens "
            f"computed; {peak} slots held, {kv_bytes / 1e6:.1f} MB of KV cache; "
            f"{llm.spec.dtype} on {llm.runner.device}]",
            file=sys.stderr,
        )
    return 0


def _read_prompt(argument):
    try:
        if argument == "-":
            if sys.stdin is None:
                raise ValueError("standard input is closed, so there is no prompt to read")
            argument = sys.stdin.read()
        argument.encode()  # an argument's bytes that are no UTF-8 have come as half characters
    except UnicodeError as error:
        raise ValueError("the prompt is not valid Unicode") from error
    if not argument:
        raise ValueError("the prompt is empty")
    return argument
