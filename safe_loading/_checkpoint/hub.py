"""From a folder or a hub id, as a user wrote it, to a folder on this machine, with one hub request if all is cached.

``from_pretrained`` asks the hub once or twice per file. Here the commit and its list of files are requested once. Every
file is then fetched by that commit, for which huggingface_hub needs no request if the file is in its cache.
"""

from __future__ import annotations

import dataclasses
import difflib
import glob
import os
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safe_loading._core.paths import is_there, path_text
from safe_loading.errors import ArgumentError, CheckpointError, CheckpointNotFound, PickleRefused

from .index import read_index
from .mlx import MLX_WEIGHTS
from .other_things import address, other_thing
from .strict_json import read_json_object
from .weight_files import ADAPTER_CONFIG, ADAPTER_PICKLE, ADAPTER_SINGLE, names_of_model

_MOST_CHARACTERS = 96  # of a hub id (huggingface_hub's validate_repo_id)
_REVISION = re.compile(r"[^\s/.\\\x00-\x1f\x7f~^:?*\[][^\s\\\x00-\x1f\x7f~^:?*\[]{0,254}")
Chooser = Callable[[frozenset[str], Callable[[str], Path]], list[str]]


@dataclasses.dataclass(frozen=True)
class Resolved:
    """Where the files of a source that a user named are on this machine."""

    source: str  # what the user wrote
    folder: Path  # the one that holds the files, the subfolder included
    commit: str | None = None  # the hub's commit hash; None for a local folder


def resolve(
    source: str | os.PathLike[str],
    choose: Chooser,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    hub: Mapping[str, Any] | None = None,
    gguf: bool = False,
) -> Resolved:
    """Return the folder of ``source``; when it is a hub id, download the files needed.

    ``choose`` gets the names in the subfolder and a function that downloads one of them, and returns the names needed.
    ``hub`` holds ``token``, ``cache_dir`` and ``local_files_only``, as for ``huggingface_hub.hf_hub_download``;
    ``gguf`` is whether one GGUF file of the folder is asked for.
    """
    if revision and not is_revision(revision):
        raise ArgumentError(
            f"revision={revision!r:.80} cannot be a branch, a tag or a commit of a hub id. Pass the name of one, or "
            f"leave it out."
        )
    text = path_text(source, "source")
    path = Path(text).expanduser()
    if is_there(path):
        if revision is not None:
            raise ArgumentError(f"revision={revision!r} is for hub ids, and {text!r} is a folder. Leave it out.")
        return Resolved(text, _folder_at(path / subfolder if subfolder else path, gguf=gguf))
    _refuse_address(text)
    if not is_hub_id(text):
        raise CheckpointNotFound(
            f"{text!r:.300} is not a folder on this machine (working folder {Path.cwd()}) and cannot be a hub id, "
            f"which is 'name' or 'owner/name'. Check the path.{did_you_mean(path)}"
        )
    return _resolve_on_hub(text, choose, revision, subfolder, dict(hub or {}))


def folder_here(source: str | os.PathLike[str], argument: str) -> Path:
    """Return a folder on this machine; refuse other things that are there by their names, and addresses of the hub."""
    text = path_text(source, argument)
    path = Path(text).expanduser()
    if is_there(path):
        return _folder_at(path)
    _refuse_address(text)
    return path


@dataclasses.dataclass(frozen=True)
class HubOptions:
    """The place of one folder or hub id, in the words that every verb has for it."""

    revision: str | None = None  # branch, tag or commit of a hub id
    subfolder: str | None = None  # folder inside it
    token: str | bool | None = None  # of the hub, as for huggingface_hub

    def find(self, source: str | os.PathLike[str]) -> Path:
        """Return the folder with the small files of ``source``, downloaded where they are not in the cache."""
        hub = {} if self.token is None else {"token": self.token}
        return resolve(source, small_files, revision=self.revision, subfolder=self.subfolder, hub=hub).folder

    def refuse_for(self, source: object) -> None:
        """Refuse options of a folder or a hub id for a ``source`` that is neither."""
        passed = [f"{name}=" for name, value in vars(self).items() if value is not None]
        if passed:
            kind = type(source).__name__
            raise ArgumentError(f"{', '.join(passed)}: for a folder or a hub id, and this is a {kind}. Leave it out.")


def adapter_files(names: frozenset[str], fetch: Callable[[str], Path]) -> list[str]:
    """Choose an adapter's files: its config and its weights; a pickle only if there are no others."""
    weights = next((name for name in (ADAPTER_SINGLE, MLX_WEIGHTS) if name in names), ADAPTER_PICKLE)
    return [name for name in (ADAPTER_CONFIG, weights) if name in names]


def base_files(options: Mapping[str, object]) -> Chooser:
    """Return a chooser of a base model's files: every small JSON file, and the weights that ``options`` ask for.

    These are arguments of ``from_pretrained``: ``variant`` ("fp16" chooses ``model.fp16.safetensors``),
    ``trust_remote_code`` (Python files too), ``gguf_file``, ``use_safetensors=False`` (pickles); others do not matter.
    """
    variant = str(options["variant"]) if options.get("variant") else None

    def choose(names: frozenset[str], fetch: Callable[[str], Path]) -> list[str]:
        small = [name for name in sorted(names) if "/" not in name and name.endswith((".json", ".jinja"))]
        chosen = [name for name in small if name != ADAPTER_CONFIG]  # transformers would load that adapter too
        if options.get("trust_remote_code"):
            chosen += [name for name in sorted(names) if name.endswith(".py")]
        if gguf_file := options.get("gguf_file"):
            return [*chosen, str(gguf_file)]
        pickles = [name for name in sorted(names) if name.startswith("pytorch_model") and name.endswith(".bin")]
        if options.get("use_safetensors") is False:
            return [*chosen, *pickles]
        single, index = names_of_model(names, variant)
        if single in names:
            return [*chosen, single]
        if index not in names and any("/" not in name and name.endswith(".safetensors") for name in names):
            config = read_json_object(fetch("config.json")) if "config.json" in names else {}
            single = str(config.get("transformers_weights"))  # a name of its own
            index = single if single.endswith(".index.json") else index
            if single in names and single != index:
                return [*chosen, single]
        if index in names:
            return [*chosen, *sorted(set(read_index(fetch(index)).weight_map.values()))]
        if pickles:
            raise PickleRefused(
                f"The weights of the base are pickles only ({pickles[0]}, ...), which can run code when they are read. "
                f"Convert it once: load it with from_pretrained(..., use_safetensors=False), call "
                f"save_pretrained, and pass that folder."
            )
        return chosen

    return choose


def is_revision(value: object) -> bool:
    """Return whether a value can be the name of a branch, a tag or a commit, which also names a file of the cache.

    By the rules of ``git check-ref-format`` that matter for a path.
    """
    return isinstance(value, str) and bool(_REVISION.fullmatch(value)) and ".." not in value


def small_files(names: frozenset[str], fetch: Callable[[str], Path]) -> list[str]:
    """Choose the JSON and Python files of the top folder: all that a model on the meta device needs."""
    return [name for name in sorted(names) if "/" not in name and name.endswith((".json", ".py"))]


def is_cached(repo: str, name: str) -> bool:
    """Return whether the cache has a file of a repository, of any commit."""
    return is_hub_id(repo) and any(_repository_cache(repo, None).glob(f"snapshots/*/{glob.escape(name)}"))


def is_hub_id(text: str) -> bool:
    """Return whether a text that is no path on this machine may be a hub id, ``name`` or ``owner/name``."""
    names = text.split("/")
    return (
        len(text) <= _MOST_CHARACTERS
        and len(names) <= 2
        and all(name and name[0] not in ".~" and "\\" not in name for name in names)
    )


def _folder_at(path: Path, *, gguf: bool = False) -> Path:
    if other := other_thing(path, gguf=gguf):
        raise CheckpointNotFound(f"{path} {other.message}; {other.fix}.")
    if not path.is_dir():
        raise CheckpointNotFound(f"{path} is not a folder. Pass the folder that holds the files.")
    return path


def _refuse_address(text: str) -> None:
    if page := address(text):
        raise CheckpointNotFound(f"{text!r:.300} {page.message}; {page.fix}.")


def did_you_mean(path: Path) -> str:
    """Return a sentence with the folders beside a missing one whose names are like its name; "" if none is."""
    try:
        folders = [entry.name for entry in path.parent.iterdir() if entry.is_dir()]
    except OSError:
        return ""
    alike = difflib.get_close_matches(path.name, folders)
    return f" Did you mean {' or '.join(repr(str(path.with_name(name))) for name in alike)}?" if alike else ""


def _resolve_on_hub(
    repo: str, choose: Chooser, revision: str | None, subfolder: str | None, hub: dict[str, Any]
) -> Resolved:
    # Imported here: huggingface_hub imports an HTTP client, which a local folder never needs.
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    prefix = f"{subfolder.strip('/')}/" if subfolder else ""
    try:
        if hub.get("local_files_only") or constants.HF_HUB_OFFLINE:
            folder = _cached_snapshot(repo, revision, hub.get("cache_dir"))
            commit, names = folder.name, frozenset(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
        else:
            commit, names = _commit_and_files(repo, revision, hub.get("token"))
            _write_reference(repo, revision or "main", commit, hub.get("cache_dir"))
        inside = frozenset(name.removeprefix(prefix) for name in names if name.startswith(prefix))

        def fetch(name: str) -> Path:
            return Path(hf_hub_download(repo, prefix + name, revision=commit, **hub))

        chosen = choose(inside, fetch)
        _download_missing(repo, [prefix + name for name in chosen], commit, hub)
        paths = [fetch(name) for name in chosen]
    except (HFValidationError, http_error(), LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError) as error:
        # Most likely a misspelt path that looks like a hub id, so the message says first that it is not a folder.
        raise CheckpointNotFound(
            f"{repo!r} (revision {revision or 'main'}) is not a folder here, and could not be fetched from the hub: "
            f"{type(error).__name__}: {error}. Check the name, the token and the network; set HF_HUB_OFFLINE=1 to "
            f"use what was downloaded before; or pass a local folder.{did_you_mean(Path(repo))}"
        ) from error
    if not paths:
        raise CheckpointError(
            f"{repo!r} at commit {commit} has no files to load in {subfolder or 'its top folder'}; it holds "
            f"{sorted(names)[:8]}. Check the subfolder and the revision."
        )
    return Resolved(repo, paths[0].parent, commit)


def http_error() -> type[Exception]:
    """Return the base class of the HTTP client's errors: no connection, no answer in time, or an error status.

    The client is httpx or httpx2, depending on the version of huggingface_hub, which does not export the class.
    """
    from huggingface_hub import errors

    http_error: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]  # as above
    return http_error


def _commit_and_files(repo: str, revision: str | None, token: str | bool | None) -> tuple[str, frozenset[str]]:
    from huggingface_hub import HfApi

    info = HfApi(token=token).model_info(repo, revision=revision)
    if info.sha is None:
        raise CheckpointError(f"The hub gave no commit for {repo!r} (revision {revision or 'main'}).")
    return info.sha, frozenset(sibling.rfilename for sibling in info.siblings or ())


def _download_missing(repo: str, names: list[str], commit: str, hub: dict[str, Any]) -> None:
    """Download the files that are not in the cache, several at a time; costs no request if all are."""
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    cache = hub.get("cache_dir")
    missing = [name for name in names if not isinstance(try_to_load_from_cache(repo, name, cache, commit), str)]
    if len(missing) > 1:
        snapshot_download(repo, revision=commit, allow_patterns=[glob.escape(name) for name in missing], **hub)


def _write_reference(repo: str, revision: str, commit: str, cache_dir: str | os.PathLike[str] | None) -> None:
    """Write which commit a branch or tag stands for to the place where every library looks it up offline."""
    if revision == commit:
        return
    reference = _repository_cache(repo, cache_dir) / "refs" / revision
    if reference.is_file() and reference.read_text() == commit:
        return
    reference.parent.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed, because other processes and threads may read or write the same reference now.
    scratch = reference.with_name(f"{reference.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    scratch.write_text(commit)
    scratch.replace(reference)


def _repository_cache(repo: str, cache_dir: str | os.PathLike[str] | None) -> Path:
    from huggingface_hub import constants

    return Path(cache_dir or constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def _cached_snapshot(repo: str, revision: str | None, cache_dir: str | os.PathLike[str] | None) -> Path:
    root = _repository_cache(repo, cache_dir)
    reference = root / "refs" / (revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else (revision or "main")
    folder = root / "snapshots" / commit
    if not folder.is_dir():
        raise CheckpointNotFound(
            f"{repo!r} (revision {revision or 'main'}) is not a folder here and not in the cache {root.parent}, and "
            f"the hub must not be asked (HF_HUB_OFFLINE or local_files_only). Download it first, or pass a "
            f"local folder.{did_you_mean(Path(repo))}"
        )
    return folder
