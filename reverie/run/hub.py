"""Packages on the Hugging Face Hub: `hf://user/name`, `hf://user/name@revision`.

Only JSON and safetensors files that belong to a package are downloaded. The revision
(by default `main`) is resolved to a commit first, so that all files are of one commit.
"""

from __future__ import annotations

import os
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from reverie.api import UserError
from reverie.log.messages import print_message
from reverie.plugins import install_command
from reverie.run.package import package_error, unpack
from reverie.storage.limits import InvalidFile, open_regular

PREFIX = "hf://"
_PART = r"[A-Za-z0-9][\w.-]{0,95}"  # name of a user or repository
_NAME = re.compile(rf"({_PART}/{_PART})(?:@([\w./-]{{1,200}}))?")
"""Matches `user/name` and `user/name@revision`."""


class HubName(NamedTuple):
    """A repository on the Hub, and a branch, tag or commit (None for `main`)."""

    repository: str
    revision: str | None


def is_hub_name(name: str) -> bool:
    """True for `hf://...`, and for `hf:/...`, which `Path` makes of it."""
    return name.startswith(PREFIX) or name.startswith(PREFIX[:-1])


def parse_name(name: str) -> HubName:
    """Return repository and revision of `hf://user/name@revision`."""
    short = re.sub("^hf:/{1,2}", "", name)
    match = _NAME.fullmatch(short)
    if not match:
        raise UserError(
            f"{name!r} is not the name of a repository on the Hub.\n"
            "  Fix: user/name, or user/name@revision."
        )
    return HubName(match[1], match[2])


def import_hub() -> Any:
    """Return the module `huggingface_hub`."""
    try:
        import huggingface_hub
    except ImportError:
        raise UserError(
            "The Hugging Face Hub needs the package huggingface_hub, which is not "
            f"installed.\n  Fix: {install_command('hub')}"
        ) from None
    return huggingface_hub


def endpoint() -> str | None:
    """Return the address of the Hub, from `HF_ENDPOINT`; None for the public one."""
    return os.environ.get("HF_ENDPOINT") or None


def download(name: str) -> Path:
    """Download a package, print its commit, and return it as a run folder."""
    hub, (repository, revision) = import_hub(), parse_name(name)
    address = endpoint()
    try:
        info = hub.HfApi(endpoint=address).model_info(repository, revision=revision)
        commit = str(info.sha)

        def open_file(file: str) -> AbstractContextManager[Any]:
            path = hub.hf_hub_download(
                repository, file, revision=commit, endpoint=address
            )
            return open_regular(Path(path))

        folder = unpack(open_file)
    except InvalidFile as error:
        raise package_error(name, error) from None
    except Exception as error:
        raise explain(error, name) from error
    print_message(f"Using {repository} at commit {commit}, unpacked to {folder}.")
    return folder


def explain(error: Exception, name: str) -> Exception:
    """Return a `UserError` for errors of the Hub; other errors as they are."""
    from huggingface_hub import errors

    repository = parse_name(name).repository
    if isinstance(error, UserError):
        return error
    is_offline = isinstance(error, errors.LocalEntryNotFoundError)
    if isinstance(error, errors.EntryNotFoundError) and not is_offline:
        return package_error(name, InvalidFile("lacks files of a package"))
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(
            f"{repository} has no such revision: {name}.\n"
            f"  Fix: hf://{repository}, or a branch, tag or commit of it."
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return UserError(
            f"The Hub has no repository {repository} that you may use.\n"
            "  Fix: check the name; for a private repository or to write, log in "
            "with `hf auth login`."
        )
    if isinstance(error, errors.HfHubHTTPError | errors.LocalTokenNotFoundError):
        reason = " ".join(str(error).split())[:300]
        return UserError(
            f"The Hub refused the request for {repository}: {reason}\n"
            "  Fix: log in with `hf auth login`, or try again later."
        )
    is_http_error = type(error).__module__.startswith("http")
    if is_offline or is_http_error or isinstance(error, OSError):
        reason = " ".join(str(error).split())[:200]
        return UserError(
            f"The Hub cannot be reached for {repository}: {reason}\n"
            "  Fix: check the network connection, or use a file of `reverie pack`."
        )
    return error
