"""Token ids to text, while they come."""

import re

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no character (yet)
BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")  # SentencePiece's, for what its vocabulary lacks
TAIL = 8  # prompt tokens to decode behind, if they will do


class IncrementalDetokenizer:
    """Text of a growing list of tokens, in pieces that never change afterwards. Joined they are
    what one decode makes of all tokens: special ones left out, spaces not cleaned up.

    A character may be spread over several tokens, and a token's text may depend on its neighbour,
    so the last few tokens are decoded together with the new ones and only what they add is taken
    (the way of Hugging Face's text-generation-inference, and of vLLM after it).

    stop: strings that end the output. Text that might be the beginning of one is held back, so
        that a piece once given out never has to be taken back. One that holds special tokens ends
        the output where these come, though the text has none of them.
    prompt_token_ids: the text is what the tokens add to these. (Many decoders drop a space at the
        very beginning, where the output does not stand.)
    """

    def __init__(self, tokenizer, stop=(), prompt_token_ids=()):
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.prompt_token_ids = prompt_token_ids
        self._num_given = 0
        self.restart()

    def restart(self) -> None:
        """Forgets all tokens, but not what was given out: the same ones are to come again."""
        self.text = ""  # all complete characters so far, cut before a stop string
        self.stopped = False
        self._special_tokens = {}  # id -> text
        self._marks = []  # (place in the text, special token that came there)
        self._token_ids = None  # the prompt's last ones, then the output's
        self._prefix = self._read = 0  # tokens before _read have given the settled text
        self._num_settled = 0  # characters that no later token can change

    def append(self, token_ids) -> bool:
        """Takes new tokens; returns whether a stop string is now in the text."""
        self._begin()
        for token_id in token_ids:
            if self.stopped:
                break
            if token_id in self._special_tokens:
                self._marks.append((len(self.text), self._special_tokens[token_id]))
                self._search(self._num_settled)
            elif self._shown([token_id]):
                self._token_ids.append(token_id)
                self._read_on(final=False)
        return self.stopped

    def finish(self) -> None:
        """No token follows: an incomplete character comes out as U+FFFD."""
        self._begin()
        if not self.stopped:
            self._read_on(final=True)

    def next_piece(self, final: bool) -> str:
        """The text since the last call that can no longer change; all of it at the end."""
        end = len(self.text)
        if not final and not self.stopped:
            end = max(self._num_given, min(self._num_settled, self._held_from()))
        piece, self._num_given = self.text[self._num_given : end], end
        return piece

    # -- tokens to text -------------------------------------------------------------------------

    def _begin(self):
        """Takes as many of the prompt's last tokens as make a text on their own."""
        if self._token_ids is not None:
            return
        self._special_tokens = special_tokens_of(self.tokenizer)
        prompt, n = list(self.prompt_token_ids), TAIL
        while not self._stand_alone(tail := self._shown(prompt[-n:])) and n < len(prompt):
            n *= 2
        self._read, self._token_ids = len(tail), tail

    def _shown(self, token_ids):
        """Those that a text shows: neither special nor unknown (a model may have more ids)."""
        tokens = self.tokenizer.convert_ids_to_tokens(token_ids)
        pairs = zip(token_ids, tokens, strict=True)
        return [i for i, token in pairs if token is not None and i not in self._special_tokens]

    def _stand_alone(self, token_ids):
        text = self._decode(token_ids)
        return text and REPLACEMENT not in text and not self._is_byte(token_ids[0])

    def _is_byte(self, token_id):
        return BYTE_TOKEN.fullmatch(self.tokenizer.convert_ids_to_tokens(token_id)) is not None

    def _read_on(self, final):
        before = self._decode(self._token_ids[self._prefix : self._read])
        text = self._decode(self._token_ids[self._prefix :])
        # The text before has changed where the prompt ends within a character: it is the output's.
        new = text[_num_shared(before, text) :]
        if not new or (new.endswith(REPLACEMENT) and not final):
            return
        searched, self.text = self._num_settled, self.text[: self._num_settled] + new
        # A run of byte tokens is read as a whole: one more, and all of it may be no text at all.
        if final or not self._is_byte(self._token_ids[-1]):
            self._prefix, self._read = self._read, len(self._token_ids)
            self._num_settled = len(self.text)
        self._search(searched)

    def _decode(self, token_ids):
        return self.tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    # -- stop strings ---------------------------------------------------------------------------

    def _search(self, searched):
        """searched: so much of the text is known to end no stop string."""
        found = []
        for text, marks in self._views():
            start = 0 if marks else max(0, searched + 1 - max(map(len, self.stop)))
            places = [text.find(stop, start) for stop in self.stop]
            found += [_without(marks, place) for place in places if place >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def _held_from(self):
        """Where the longest end of the text begins that may become a stop string."""
        held_from = [len(self.text)]
        for text, marks in self._views():
            for n in range(1, min(len(text), max(map(len, self.stop)) - 1) + 1):
                if any(stop.startswith(text[-n:]) for stop in self.stop):
                    held_from.append(_without(marks, len(text) - n))
        return min(held_from)

    def _views(self):
        """What stop strings are searched in: the text, and the text with its special tokens. Each
        comes with the marks that it shows."""
        if self.stop:
            yield self.text, []
        if self.stop and self._marks:
            ends = [place for place, _ in self._marks[1:]] + [len(self.text)]
            pieces = [self.text[: self._marks[0][0]]]
            for (place, special), end in zip(self._marks, ends, strict=True):
                pieces += [special, self.text[place:end]]
            yield "".join(pieces), self._marks


def _num_shared(a, b):
    """Characters that both begin with."""
    differ = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differ, min(len(a), len(b)))


def _without(marks, place):
    """A place in the text with special tokens, as one in the text without."""
    for at, special in marks:
        if place <= at:
            break
        place = max(at, place - len(special))
    return place


def special_tokens_of(tokenizer) -> dict[int, str]:
    """Those that are left out of a text, by id."""
    named = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    return dict(named) | {i: token.content for i, token in added if token.special}
