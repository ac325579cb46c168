"""One server of ranks for all files of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rank_server import RankServer


@pytest.fixture(scope="session")
def rank_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankServer]:
    """Runs scripts in ranks that need not import the engines: `rank_server.run(script, 2, args=[...]).found`.

    Its cache of the hub, HF_HOME, is empty at first.
    """
    with RankServer({"HF_HOME": str(tmp_path_factory.mktemp("hub home"))}) as server:
        yield server
