"""The advice about ranks and their devices, and the test that takes each."""

from __future__ import annotations

_ADVISED = "ranks/test_rank_advice.py::"
_NO_DEVICE = f"{_ADVISED}test_what_is_no_device"
_EXCHANGE = f"{_ADVISED}test_ranks_and_seconds_of_an_exchange"
_MAPS = f"{_ADVISED}test_maps_that_are_empty_or_offload"

TAKEN: dict[str, dict[str, str]] = {
    "_ranks/device_for_rank.py": {
        "Start at most {} rank": f"{_ADVISED}test_more_ranks_than_devices",
        "pass an integer from 0": _NO_DEVICE,
        "Start it with torchrun": f"{_ADVISED}test_ranks_of_no_launcher",
    },
    "_ranks/device_guard.py": {
        "pass a device of this machine": _NO_DEVICE,
        "Start fewer ranks": f"{_ADVISED}test_ranks_on_one_device",
        "Call torch.cuda.set_device": f"{_ADVISED}test_a_context_on_another_card",
        "Load it with load_peft_on_rank": f"{_ADVISED}test_a_model_on_two_devices_is_loaded_onto_one",
        "pass a torch.device": _NO_DEVICE,
        "Pass device='cpu'": _NO_DEVICE,
    },
    "_ranks/exchange.py": {
        "pass 'all', 'self'": _EXCHANGE,
        "pass a positive, finite number": _EXCHANGE,
    },
    "_ranks/launcher.py": {"Start all ranks with one launcher": f"{_ADVISED}test_variables_of_two_launchers"},
    "_ranks/rank_devices.py": {
        "pass device=, or a map": _MAPS,
        "pass a map without 'cpu'": _MAPS,
    },
    "_ranks/same_on_ranks.py": {
        "Pass the same ones": f"{_ADVISED}test_arguments_that_ranks_disagree_on",
        "Copy it to each node": "loading/test_load_on_ranks.py::"
        "test_a_folder_that_one_rank_lacks_is_named_on_all_of_them",
    },
    "_ranks/store_exchange.py": {
        ", or pass ranks='self'": "loading/test_load_on_ranks.py::test_some_ranks_or_one_can_load_without_the_others"
    },
}
