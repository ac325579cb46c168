"""The base and its adapters, found once per node and agreed on by all ranks before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safe_loading._checkpoint.adapter_folder import read_adapter
from safe_loading._checkpoint.hub import Resolved
from safe_loading._core.protocols import JsonObject
from safe_loading._ranks.exchange import Ranks
from safe_loading._ranks.same_on_ranks import FolderSeen, check_same_folders, folder_seen
from safe_loading.errors import RanksDisagree

from .sources import LoadRequest, LoadSources, resolve_all


def find_sources(request: LoadRequest, ranks: Ranks, *, timeout: float) -> LoadSources:
    """Find everything on one rank per node, read the facts on every rank, and raise RanksDisagree if ranks differ."""
    if ranks.size > 1:
        seen = ranks.exchange("look for the folders", _folders_seen(request), timeout=timeout)
        check_same_folders(ranks.ranks, seen)
    leader = ranks.leader(timeout=timeout)
    with ranks.together("find the adapter and its base", timeout=timeout) as phase:
        sources = resolve_all(request) if leader == ranks.rank else None
        phase.payload = {"leader": leader, "asked": _asked(request)}
        # A digest reads the whole adapter, so it is only taken where there is another rank to compare it with.
        if sources is not None and ranks.size > 1:
            phase.payload["found"] = _to_json(sources)
    # Compared on every rank from the same posts, so that all of them raise the same or none does.
    posts = dict(zip(ranks.ranks, phase.results, strict=True))
    problems = [*_different_requests(posts), *_different_files(posts)]
    if problems:
        raise RanksDisagree("The ranks would load different things:", problems)
    with ranks.together("read the adapter", timeout=timeout):
        return _from_json(posts[leader]["found"], request) if sources is None else sources


def _folders_seen(request: LoadRequest) -> dict[str, FolderSeen]:
    sources = {f"adapter {name!r}": source for name, source in request.adapters.items()}
    if request.base is not None and request.base.source is not None:
        sources["base_model"] = request.base.source
    return {argument: folder_seen(os.fspath(source)) for argument, source in sources.items()}


def _asked(request: LoadRequest) -> JsonObject:
    base = request.base
    return {
        "adapters": {name: os.fspath(source) for name, source in request.adapters.items()},
        "base": "a model that the caller passed" if base is None else base.source and os.fspath(base.source),
        "revisions": [request.adapter_revision, base and base.revision],
        "subfolders": [request.adapter_subfolder, base and base.subfolder],
        "allow_pickle": request.allow_pickle,
    }


def _to_json(sources: LoadSources) -> JsonObject:
    def place(source: str, folder: Path, commit: str | None) -> dict[str, str | None]:
        return {"source": source, "folder": str(folder), "commit": commit}

    base = sources.base
    return {
        "adapters": {
            name: {**place(facts.source, facts.path, facts.commit), "sha256": facts.digest()}
            for name, facts in sources.adapters.items()
        },
        "base": base and place(base.source, base.folder, base.commit),
    }


def _from_json(payload: JsonObject, request: LoadRequest) -> LoadSources:
    def resolved(place: JsonObject) -> Resolved:
        return Resolved(place["source"], Path(place["folder"]), place["commit"])

    adapters = {
        name: read_adapter(resolved(place), allow_pickle=request.allow_pickle)
        for name, place in payload["adapters"].items()
    }
    return LoadSources(adapters, payload["base"] and resolved(payload["base"]))


def _different_requests(posts: Mapping[int, JsonObject]) -> list[str]:
    """Compare the request of each rank with that of its node's leader, whose answer it takes."""
    problems = []
    for rank, post in posts.items():
        own, leaders = post["asked"], posts[post["leader"]]["asked"]
        if own != leaders:
            problems.append(
                f"rank {rank} asks for {own}, rank {post['leader']} on the same node for {leaders}; pass the same to "
                f"all ranks, or ranks='self' where each loads its own"
            )
    return problems


def _different_files(posts: Mapping[int, JsonObject]) -> list[str]:
    """Compare the sources that the leaders found: commits and contents, not paths, which may differ between nodes."""
    found = [(rank, post["found"]) for rank, post in posts.items() if "found" in post]
    if not found:
        return []
    (first_rank, first), *others = found
    problems = []
    for rank, sources in others:
        for name, adapter in sources["adapters"].items():
            reference = first["adapters"].get(name, {})
            if any(adapter[fact] != reference.get(fact) for fact in ("commit", "sha256")):
                problems.append(
                    f"adapter {name!r} ({adapter['source']}): rank {first_rank} has commit {reference.get('commit')}, "
                    f"SHA-256 {reference.get('sha256')} in {reference.get('folder')}; rank {rank} has commit "
                    f"{adapter['commit']}, SHA-256 {adapter['sha256']} in {adapter['folder']}. Pin the revision, or "
                    f"copy the same files to each node"
                )
        commit, reference_commit = ((side["base"] or {}).get("commit") for side in (sources, first))
        if commit != reference_commit:
            problems.append(
                f"base: rank {first_rank} has commit {reference_commit}, rank {rank} has {commit}. Pin base_revision="
            )
    return problems
