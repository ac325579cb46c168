"""Where the base and the adapters lie, found once per node and agreed on by all ranks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safe_loading._checkpoint.hub import Chooser, Resolved, adapter_files, base_files, resolve
from safe_loading._core.paths import is_there
from safe_loading._ranks.exchange import Ranks
from safe_loading.errors import AdapterError, CheckpointNotFound, RanksDisagree

from .adapter_facts import AdapterFacts, digest, read_adapter

Source = str | os.PathLike[str]
HUB_OPTIONS = frozenset({"token", "cache_dir", "local_files_only"})


@dataclasses.dataclass(frozen=True)
class LoadSources:
    """What was found.

    Attributes:
        adapters: The facts of each adapter, by the name that it gets.
        base: The base's folder; None when the caller gave a model.
    """

    adapters: dict[str, AdapterFacts]
    base: Resolved | None


@dataclasses.dataclass(frozen=True)
class LoadRequest:
    """What the caller asked for.

    Attributes:
        adapters: Folder or hub id of each adapter, by the name that it gets.
        base: Folder or hub id of the base; None takes the one that the first adapter names.
        wants_base: Whether a base is to be found at all; False when the caller gave a model.
        adapter_revision: Revision of the adapters; never the base's.
        adapter_subfolder: Subfolder of the adapters; never the base's.
        base_revision: Revision of the base; None takes the one in the adapter's config.
        base_subfolder: Subfolder of the base.
        allow_pickle: Whether ``.bin`` adapters are read.
        base_kwargs: Arguments of the base's ``from_pretrained``: ``token``, ``cache_dir``, ``local_files_only``,
            ``variant`` and ``trust_remote_code`` matter here.
    """

    adapters: Mapping[str, Source]
    base: Source | None
    wants_base: bool
    adapter_revision: str | None = None
    adapter_subfolder: str | None = None
    base_revision: str | None = None
    base_subfolder: str | None = None
    allow_pickle: bool = False
    base_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def find_sources(request: LoadRequest, ranks: Ranks, *, timeout: float) -> LoadSources:
    """Resolve on one rank per node, read the facts on every rank, and make sure that all nodes have the same files.

    Raises:
        RanksDisagree: Two nodes have another commit, or an adapter of other content.
        RankError: Another rank found nothing.
    """
    leader = ranks.leader(timeout=timeout)
    with ranks.together("find the adapter and its base", timeout=timeout) as phase:
        found = resolve_all(request) if leader == ranks.rank else None
        phase.payload = {"leader": leader, "asked": _asked(request)}
        if found is not None and ranks.size > 1:
            phase.payload["found"] = _to_json(found)
    posts = dict(zip(ranks.ranks, phase.results, strict=True))
    problems = [*_asked_differently(posts), *_found_differently(posts)]
    if problems:
        raise RanksDisagree("The ranks would load different things:", problems)
    with ranks.together("read the adapter", timeout=timeout):
        return _from_json(posts[leader]["found"], request) if found is None else found


def resolve_all(
    request: LoadRequest, *, choose_adapter: Chooser = adapter_files, choose_base: Chooser | None = None
) -> LoadSources:
    """Find everything that was asked for, on this rank alone.

    Args:
        request: What was asked for.
        choose_adapter: Which files of an adapter on the hub are needed.
        choose_base: Which files of the base; None takes those that loading it needs.
    """
    hub = {name: request.base_kwargs[name] for name in HUB_OPTIONS if name in request.base_kwargs}
    facts = {}
    for name, source in request.adapters.items():
        resolved = resolve(
            source,
            choose_adapter,
            revision=request.adapter_revision,
            subfolder=request.adapter_subfolder,
            hub=hub,
        )
        facts[name] = read_adapter(resolved, allow_pickle=request.allow_pickle)
    if not request.wants_base:
        return LoadSources(facts, None)
    first = next(iter(facts.values()))
    base = request.base or first.config.get("base_model_name_or_path")
    if not base:
        raise AdapterError(f"{first.folder}/adapter_config.json names no base model. Pass base_model=.")
    revision = request.base_revision
    if revision is None and request.base is None and not is_there(Path(base)):
        revision = first.config.get("revision")  # the revision in an adapter's config is its base's (AutoPeftModel)
    chooser = choose_base or base_files(request.base_kwargs)
    try:
        found = resolve(base, chooser, revision=revision, subfolder=request.base_subfolder, hub=hub)
    except CheckpointNotFound as error:
        if request.base is not None:
            raise
        raise CheckpointNotFound(
            f"{error} {first.folder}/adapter_config.json names this base; where it lies elsewhere now, pass "
            f"base_model=."
        ) from error
    return LoadSources(facts, found)


def _asked(request: LoadRequest) -> dict[str, Any]:
    base = request.base if request.base is None else os.fspath(request.base)
    return {
        "adapters": {name: os.fspath(source) for name, source in request.adapters.items()},
        "base": base if request.wants_base else "a model that the caller passed",
        "revisions": [request.adapter_revision, request.base_revision],
        "subfolders": [request.adapter_subfolder, request.base_subfolder],
        "allow_pickle": request.allow_pickle,
    }


def _to_json(found: LoadSources) -> dict[str, Any]:
    return {
        "adapters": {name: [f.source, str(f.folder), f.commit, digest(f)] for name, f in found.adapters.items()},
        "base": found.base and [found.base.source, str(found.base.folder), found.base.commit],
    }


def _from_json(payload: Mapping[str, Any], request: LoadRequest) -> LoadSources:
    facts = {
        name: read_adapter(Resolved(source, Path(folder), commit), allow_pickle=request.allow_pickle)
        for name, (source, folder, commit, _) in payload["adapters"].items()
    }
    base = payload["base"]
    return LoadSources(facts, base and Resolved(base[0], Path(base[1]), base[2]))


def _asked_differently(posts: Mapping[int, Any]) -> list[str]:
    """Compare what each rank asked for with what the leader of its node did, whose answer it takes."""
    problems = []
    for rank, post in posts.items():
        ours, theirs = post["asked"], posts[post["leader"]]["asked"]
        if ours != theirs:
            problems.append(
                f"rank {rank} asks for {ours}, rank {post['leader']} on the same node for {theirs}; pass the same to "
                f"all ranks, or ranks='self' where each loads its own"
            )
    return problems


def _found_differently(posts: Mapping[int, Any]) -> list[str]:
    """Compare what the nodes found: commits and contents, not paths, which may differ between nodes."""
    found = [(rank, post["found"]) for rank, post in posts.items() if "found" in post]
    if not found:
        return []
    (first_rank, first), *others = found
    problems = []
    for rank, each in others:
        for name, (source, folder, commit, sha) in each["adapters"].items():
            _, first_folder, first_commit, first_sha = first["adapters"].get(name, (None, None, None, None))
            if (commit, sha) != (first_commit, first_sha):
                problems.append(
                    f"adapter {name!r} ({source}): rank {first_rank} has commit {first_commit}, SHA-256 {first_sha} in "
                    f"{first_folder}; rank {rank} has commit {commit}, SHA-256 {sha} in {folder}. Pin the revision, or "
                    f"copy the same files to each node"
                )
        ours, theirs = (each["base"] or [None] * 3)[2], (first["base"] or [None] * 3)[2]
        if ours != theirs:
            problems.append(f"base: rank {first_rank} has commit {theirs}, rank {rank} has {ours}. Pin base_revision=")
    return problems
