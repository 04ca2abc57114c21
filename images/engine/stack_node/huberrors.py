"""What went wrong with the hub, as a sentence with what to do about it.

huggingface_hub raises the errors of the HTTP library that it happens to use (requests before 1.0, httpx, httpx2 since
2.0), so these are told by where they come from.
"""

from __future__ import annotations

import errno
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_HTTP = frozenset({"requests", "urllib3", "httpx", "httpx2", "httpcore", "httpcore2"})
_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_MOST = 200  # characters of a foreign text

_URL_SECRETS = re.compile(r"(https?://[^\s?'\"]*)\?[^\s'\"]*")  # a signed address lets its reader in
_TOKEN = "set model.token_file (HF_TOKEN_PATH) to a token that may read it"  # noqa: S105


class FetchError(Exception):
    """A model cannot be had."""

    def __init__(self, sentence: str, retry: bool = False, about_revision: bool = False) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.retry = retry  # trying again may help, without anybody's doing
        self.about_revision = about_revision  # the hub knows the model, but not this state of it


def explain(error: BaseException, name: str, cache: Path) -> FetchError:
    """The error as a sentence; `name` is the model's, with its revision."""
    if isinstance(error, FetchError):
        return error
    return _from_hub(error, name) or _from_system(error, cache) or _other(error, name)


def _from_hub(error: BaseException, name: str) -> FetchError | None:
    from huggingface_hub import errors as hub
    from huggingface_hub import get_token

    has_token = get_token() is not None
    if isinstance(error, hub.GatedRepoError):
        fix = "the token that is given has no access to it" if has_token else _TOKEN
        return FetchError(f"{name} is gated; ask for access on its page on the hub, and {_given(fix, has_token)}")
    if isinstance(error, hub.RevisionNotFoundError):
        return FetchError(f"the hub has no {name}; correct the revision", about_revision=True)
    if isinstance(error, hub.RepositoryNotFoundError):
        fix = "the token that is given has no access to it" if has_token else _TOKEN
        return FetchError(
            f"the hub knows no model {name}; correct its name, or, if it is private, {_given(fix, has_token)}"
        )
    if isinstance(error, hub.HFValidationError):
        return FetchError(f"{name} is no model of the hub; a path begins with '/'")
    if isinstance(error, hub.HfHubHTTPError):
        return _from_status(getattr(error.response, "status_code", 0), name, has_token)
    return None


def _given(fix: str, has_token: bool) -> str:
    return f"use one that has: {fix}" if has_token else fix


def _from_status(status: int, name: str, has_token: bool) -> FetchError:
    if status in (401, 403):
        fix = "it refuses the token that is given (model.token_file); use another" if has_token else _TOKEN
        return FetchError(f"the hub does not give {name} to this node (HTTP {status}): {fix}")
    if status in _BUSY:
        return FetchError(f"the hub cannot serve {name} now (HTTP {status})", retry=True)
    return FetchError(f"the hub answers HTTP {status} when it is asked for {name}; correct the name")


def _from_system(error: BaseException, cache: Path) -> FetchError | None:
    number = getattr(error, "errno", None)
    where = getattr(error, "filename", None) or cache
    if number in _FULL:
        return FetchError(f"the disk of {cache} is full; free some of it, or put the cache elsewhere (model.cache)")
    if number in _DENIED and not _foreign(error):
        return FetchError(
            f"{where} cannot be read or written; let this container's user do that, or, if the model is there "
            "already, set model.offline: true"
        )
    return None


def _other(error: BaseException, name: str) -> FetchError:
    """Everything else comes from the network, as far as an error may say so."""
    from huggingface_hub import errors as hub

    if isinstance(error, (hub.LocalEntryNotFoundError, ConnectionError, TimeoutError)) or _foreign(error):
        cause = error.__cause__ or error
        return FetchError(f"the hub cannot be reached for {name} ({_words(cause)})", retry=True)
    if "Consistency check failed" in str(error):
        return FetchError(f"a file of {name} came with another size than the hub lists", retry=True)
    return FetchError(f"{name} cannot be fetched ({_words(error)})", retry=isinstance(error, OSError))


def _foreign(error: BaseException) -> bool:
    """Whether an HTTP library made it, or one that fetches in another way."""
    return any(kind.__module__.partition(".")[0] in _HTTP for kind in type(error).__mro__)


def _words(error: BaseException) -> str:
    text = _URL_SECRETS.sub(r"\1", " ".join(str(error).split()))[:_MOST]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
