"""Imported by a process that is forked later: bitsandbytes, without a look at the cards.

bitsandbytes asks for them while it is imported, and the first answer is what torch has from then on. So each fork can
have cards of its own. It is told of two, since with one it would never make the card of a tensor the current one.
"""

import contextlib
from unittest import mock

import torch  # noqa: F401 - what is patched

with (
    mock.patch("torch.cuda.is_available", return_value=True),
    mock.patch("torch.cuda.device_count", return_value=2),
    mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),
    contextlib.suppress(ImportError),
):
    import bitsandbytes  # noqa: F401 - for what it does
