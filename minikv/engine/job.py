"""The text side of a request: a prompt becomes tokens, its samples' tokens become text."""

import jinja2
import numpy as np

from minikv.engine.detokenizer import IncrementalDetokenizer
from minikv.request import CompletionOutput, RequestOutput, require_int


def tokenize(prompt, tokenizer, model_name) -> tuple[str | None, list[int]]:
    """(the prompt's text, None where it came as tokens; its token ids).

    prompt: a string, taken as it is; token ids; or chat messages, which go through the model's
    chat template. Raises TypeError or ValueError for anything else, or where the model has no
    tokenizer or no chat template.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("this model has no tokenizer: give token ids instead of text")
        return prompt, _encode(prompt, tokenizer)
    if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], dict):
        return _apply_chat_template(list(prompt), tokenizer, model_name)
    if isinstance(prompt, np.ndarray) and prompt.ndim != 1:
        raise ValueError(f"a prompt of token ids has one dimension, not shape {prompt.shape}")
    if isinstance(prompt, list | tuple | np.ndarray):
        return None, [require_int("a token id", token, at_least=0) for token in prompt]
    raise TypeError(
        "a prompt is a string, a list of token ids or a list of chat messages, not "
        f"{type(prompt).__name__}"
    )


def _apply_chat_template(messages, tokenizer, model_name):
    for message in messages:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ValueError(f"a chat message needs 'role' and 'content', but got {message!r}")
        if not isinstance(message["role"], str) or not isinstance(message["content"], str):
            raise TypeError(f"role and content of a chat message are strings, but got {message!r}")
    if tokenizer is None or not tokenizer.chat_template:
        raise ValueError(f"{model_name} has no chat template: give text or token ids")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except jinja2.TemplateError as error:
        raise ValueError(f"{model_name}'s chat template refuses these messages: {error}") from error
    except Exception as error:  # a template is a program: TypeError, RecursionError, ...
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{model_name}'s chat template fails on these messages: {what}") from error
    # The template has written the special tokens already.
    return text, _encode(text, tokenizer, add_special_tokens=False)


def _encode(text, tokenizer, **options):
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a character, say from bytes read as another text
        raise ValueError(f"the prompt is not valid Unicode: {error}") from error
    return tokenizer(text, **options)["input_ids"]


def is_one_prompt(prompts) -> bool:
    """Whether this is a single prompt of any kind, not a list of them."""
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, list | tuple | np.ndarray):
        raise TypeError(
            f"prompts must be a prompt or a list of prompts, not {type(prompts).__name__}"
        )
    first = prompts[0] if len(prompts) else None
    if isinstance(prompts, list | tuple) and getattr(first, "ndim", 0):  # a list of arrays
        return False
    return isinstance(first, dict) or hasattr(first, "__index__")


def eos_token_ids(model, tokenizer) -> set[int]:
    """Tokens that end an answer by any of three: generation_config, config and the tokenizer. A
    model tuned for chat often names the end of a turn in only one of them."""
    config = getattr(model, "config", None)
    text_config = config and config.get_text_config(decoder=True)
    eos = set()
    for names in (getattr(model, "generation_config", None), config, text_config, tokenizer):
        ids = getattr(names, "eos_token_id", None)
        eos |= set(ids) if isinstance(ids, list | tuple) else {ids}
    return eos - {None}


def sample_ids_of(request_id, n) -> list[str]:
    """Ids of the n samples of a request; the first has the request's own."""
    return [request_id] + [f"{request_id}.{i}" for i in range(1, n)]


class Sample:
    """One sample of a job: its request and the text of what it has sampled so far."""

    def __init__(self, request, tokenizer, stop):
        prompt_token_ids = request.token_ids[: request.num_prompt_tokens]
        self.request = request
        self.detokenizer = None
        if tokenizer is not None:
            self.detokenizer = IncrementalDetokenizer(tokenizer, stop, prompt_token_ids)
        self._num_read = 0  # output tokens that are in the text
        self._is_reading = False  # still true at the next call: this one was cut short

    @property
    def end_reason(self) -> str | None:
        """Why its text ends the request: `stop` (a stop string), `error` (no text can be made)."""
        if self.request.error:
            return "error"
        return "stop" if self.detokenizer and self.detokenizer.stopped else None

    @property
    def text(self):
        return self.detokenizer.text if self.detokenizer else ""

    def read_new_tokens(self) -> bool:
        """Takes in what was sampled since the last call; whether there was anything. A tokenizer
        that fails is the end of this request only."""
        request = self.request
        if self._is_reading and self.detokenizer:
            self.detokenizer.restart()
            self._num_read = 0
        self._is_reading = True
        new = request.token_ids[request.num_prompt_tokens + self._num_read :]
        self._num_read += len(new)
        if self.detokenizer:
            try:
                self._read(new)
            except Exception as error:
                request.error = f"its text cannot be made ({type(error).__name__}: {error})"
        # It ended in the same step: the text says why.
        if request.finish_reason == "length" or (request.finish_reason and request.error):
            request.finish_reason = self.end_reason or request.finish_reason
        self._is_reading = False
        return bool(new)

    def _read(self, new):
        ended_by_token = bool(new) and new[-1] in self.request.stop_token_ids
        self.detokenizer.append(new[:-1] if ended_by_token else new)
        if self.request.finish_reason is not None:
            self.detokenizer.finish()


class Job:
    """What was asked in one add_request: a prompt and its n samples."""

    def __init__(self, request_id, prompt, prompt_token_ids, params, requests, tokenizer):
        self.request_id, self.prompt, self.params = request_id, prompt, params
        self.prompt_token_ids = prompt_token_ids
        self.driven = False  # by generate or a stream, and nobody else waits for its outputs
        self.withdrawn = False  # to be ended and told of to nobody
        self.samples = [Sample(request, tokenizer, params.stop) for request in requests]

    def snapshot(self, metrics) -> RequestOutput:
        requests = [sample.request for sample in self.samples]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(self.prompt_token_ids),
            outputs=[
                CompletionOutput(
                    index=request.sample_index,
                    text=sample.text,
                    token_ids=request.token_ids[request.num_prompt_tokens :],
                    finish_reason=request.finish_reason,
                )
                for sample, request in zip(self.samples, requests, strict=True)
            ],
            finished=all(request.finish_reason for request in requests),
            num_cached_tokens=max(0, requests[0].num_cached_tokens),
            metrics=[metrics.of(request) for request in requests],
            error=next((request.error for request in requests if request.error), None),
        )
