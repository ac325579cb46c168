"""Cards that are given by a size: the ones that people mean are named with what they really offer."""

from __future__ import annotations

import pytest

from safe_loading._core.cards import CARDS, card_of, sold_as


@pytest.mark.parametrize(
    ("size", "says"),
    [("24GB", "24GB is 22.4 GiB."), ("24GB", "rtx-4090 23.5 GiB"), ("24GB", "l4 21.9 GiB"), ("80GB", "h100 79.1 GiB")],
)
def test_a_size_names_the_cards_that_are_sold_under_it(size: str, says: str) -> None:
    assert says in sold_as(card_of(size))


@pytest.mark.parametrize("text", [*CARDS, "7GB", str(CARDS["h100"].memory)])
def test_a_name_and_a_size_of_its_own_say_nothing(text: str) -> None:
    assert sold_as(card_of(text)) == ""
