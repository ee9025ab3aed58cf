"""`python -m minikv generate`, in this process."""

import io

import pytest

from minikv import __main__
from minikv.commands import environment
from minikv.commands.generate import main
from minikv.engine import LLM
from minikv.request import SamplingParams

TINY = ["--model", "tiny", "--dtype", "float32", "--max-tokens", "12"]


@pytest.fixture(scope="module")
def answer():
    """prompt -> what the engine answers, greedy, 12 tokens."""
    llm, params = LLM("tiny", dtype="float32"), SamplingParams(max_tokens=12)
    return lambda prompt: llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].text


def chat(text):
    return [{"role": "user", "content": text}]


def test_it_answers_through_the_chat_template(capsys, answer):
    assert main(["Hello", *TINY]) == 0
    captured = capsys.readouterr()
    assert captured.out == answer(chat("Hello")) + "\n"
    assert captured.err == ""


def test_raw_continues_the_text_itself(capsys, answer):
    assert main(["Hello", "--raw", *TINY]) == 0
    assert capsys.readouterr().out == answer("Hello") + "\n"


def test_it_prints_while_the_tokens_come(monkeypatch, answer):
    flushed = []

    class Out(io.StringIO):
        def flush(self):
            flushed.append(self.getvalue())

    monkeypatch.setattr("sys.stdout", Out())
    assert main(["Hello", "--raw", *TINY]) == 0
    assert len(set(flushed)) > 3
    assert all(answer("Hello").startswith(text.rstrip("\n")) for text in flushed)


def test_a_dash_reads_the_prompt_from_standard_input(monkeypatch, capsys, answer):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\nworld"))
    assert main(["-", "--raw", *TINY]) == 0
    assert capsys.readouterr().out == answer("Hello\nworld") + "\n"


@pytest.mark.parametrize(("stdin", "message"), [
    (io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="utf-8"), "the prompt is not valid Unicode"),
    (io.StringIO(""), "the prompt is empty"),
    (None, "standard input is closed, so there is no prompt to read"),
])  # fmt: skip
def test_a_standard_input_without_a_prompt(monkeypatch, capsys, stdin, message):
    monkeypatch.setattr("sys.stdin", stdin)
    assert main(["-", "--raw", *TINY]) == 1
    assert capsys.readouterr().err == f"minikv generate: {message}\n"


def test_sampling_options_reach_the_engine(capsys):
    def run(*options):
        assert main(["Hello", *TINY, *options]) == 0
        return capsys.readouterr().out

    hot = ["--temperature", "1.5"]
    assert run(*hot, "--seed", "1") == run(*hot, "--seed", "1") != run(*hot, "--seed", "2")
    assert run(*hot, "--top-k", "1") == run(*hot, "--top-p", "1e-9") == run()
    text = run()
    stop = text.rstrip("\n")[3]
    assert run("--stop", "never there", "--stop", stop) == text[: text.index(stop)] + "\n"


def test_stats_go_to_standard_error(capsys, answer):
    assert main(["Hello", "--raw", "--stats", *TINY]) == 0
    captured = capsys.readouterr()
    assert captured.out == answer("Hello") + "\n"
    assert captured.err.startswith("[12 steps in ")
    assert "16 tokens computed" in captured.err
    assert "float32 on cpu" in captured.err


@pytest.mark.parametrize("argv, message", [
    ([""], "the prompt is empty"),
    (["a\udcff"], "the prompt is not valid Unicode"),
    (["Hello", "--max-tokens", "0"], "max_tokens is 0"),
    (["Hello", "--temperature", "nan"], "temperature is nan"),
    (["Hello", "--top-p", "2"], "top_p is 2"),
    (["Hello", "--model", "smolm2"], "did you mean 'smollm2'"),
    (["Hello", "--model", "./nowhere"], "there is no folder './nowhere'"),
    (["Hello", "--model", "tiny", "--dtype", "int3"], "int3"),
    (["Hello", "--model", "tiny", "--device", "tpu"], "tpu"),
    (["x" * 3000, "--model", "tiny"], "tokens, but max_model_len is 2048"),
])  # fmt: skip
def test_an_error_is_one_line_and_status_1(capsys, argv, message):
    assert main(argv) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("minikv generate: ")
    assert message in captured.err


def test_ctrl_c_ends_the_line_with_status_130(monkeypatch, capsys):
    def interrupted(self, prompt, params):
        yield "Hel"
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", interrupted)
    assert main(["Hello", *TINY]) == 130
    assert capsys.readouterr().out == "Hel\n"


@pytest.mark.parametrize("argv, status", [(["--help"], 0), ([], 2), (["a", "--tempo", "3"], 2)])
def test_help_and_usage(capsys, argv, status):
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == status
    captured = capsys.readouterr()
    assert "python -m minikv generate" in captured.out + captured.err
    if argv == ["--help"]:
        for option in ("--model", "--dtype", "--device", "--max-tokens", "--stop", "example:"):
            assert option in captured.out


def test_it_is_a_command_of_minikv(monkeypatch, capsys, answer):
    monkeypatch.setattr(environment, "hand_over", lambda argv: None)
    assert __main__.main(["generate", "Hello", "--raw", *TINY]) == 0
    assert capsys.readouterr().out == answer("Hello") + "\n"
