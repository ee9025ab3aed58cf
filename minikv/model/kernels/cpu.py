"""Placeholder."""


def why_not(device, dtype):
    return "it has not been built yet"


def attend(query, pool, metadata, *, scaling, window=None, softcap=None):
    raise NotImplementedError
