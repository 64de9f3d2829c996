"""Advice of the library in the words of the command line: its options in place of arguments of Python."""

from __future__ import annotations

import re

__all__ = ["in_options"]

_OPTIONS = {
    "load_format": "--load-format",
    "allow_patterns": "--allow",
    "ignore_patterns": "--ignore",
    "links_to": "--links-to",
    "auto_class": "--auto-class",
    "max_shard_size": "--max-shard-size",
    "encryption_keyfile": "--encryption-keyfile",
}
_PHRASES = {
    "pass trust_remote_code=True if": "load it from Python with trust_remote_code=True if",
    ", or allow it with Strictness(lossy='warn')": " (--dtype)",
    "pass Strictness(lossy='warn')": "pass --allow-lossy",
    "pass Strictness(unexpected='warn')": "pass --allow-unknown",
    "with names='keep'": "with --names keep",
    "with overwrite=True": "with --overwrite",
    "Pass variant=": "Pass --variant ",
    "Pass subfolder=": "Pass --subfolder ",
    "names on the Hub are for load_model and get_model_loader, and convert, as text": (
        "names on the Hub are for plan, load and convert"
    ),
}
# A word of a sentence, not of a name or a path: those are quoted, or have dots and slashes around it.
_WORD = re.compile(rf"(?<![\w./'\"-])({'|'.join(_OPTIONS)})(?![\w/'\"-]|\.\w)")


def in_options(message: str) -> str:
    """Return `message` with what it advises said in options.

    >>> in_options("name the files to load with allow_patterns.")
    'name the files to load with --allow.'
    >>> in_options("'load_format': no such tensor in links_to/model")
    "'load_format': no such tensor in links_to/model"
    """
    for phrase, said in _PHRASES.items():
        message = message.replace(phrase, said)
    return _WORD.sub(lambda word: _OPTIONS[word[1]], message)
