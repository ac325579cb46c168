"""The advice about arguments that all rooms share, and the test that takes each."""

from __future__ import annotations

_ADVISED = "core/test_core_advice.py::"
_READ = f"{_ADVISED}test_an_argument_is_read_once_the_advice_is_taken"
_CARD = f"{_ADVISED}test_the_memory_of_a_card_and_one_type_of_accelerators"
_ENGINES = "core/test_engines.py::test_engines_that_are_new_enough_are_used"

TAKEN: dict[str, dict[str, str]] = {
    "_core/arguments.py": {
        "pass {}, {} or more": _READ,
        "pass a folder, a hub id or one of": _READ,
        "pass major and minor": _READ,
    },
    "_core/cards.py": {"write {}": _READ, ", or give its memory": _CARD},
    "_core/engines.py": {"Run: pip install": _ENGINES},
    "_core/parse_size.py": {
        "pass a number of bytes": _READ,
        "use the index of an accelerator": _READ,
        "pass {0: ": _READ,
        "name one type": _CARD,
        "name it once": _READ,
    },
    "_core/paths.py": {"pass a path": _READ},
    "_core/spread.py": {
        "leave out replicas": "memory/test_forecast_flat_shards.py::"
        "test_every_flat_shard_is_in_the_run_that_is_replayed",
        "Leave one of the two out": "memory/test_forecast_flat_shards.py::"
        "test_every_flat_shard_is_in_the_run_that_is_replayed",
    },
}
