"""The bars of memory: lengths on one scale, text escaped, nothing drawn for nothing."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from safe_loading._core.bars import MemoryBar, Segment, draw_bars

SVG = "{http://www.w3.org/2000/svg}"


def segments(svg: str) -> dict[str, float]:
    """The width of each segment by its title; frames and the legend have none."""
    rects = [rect for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect") if len(rect)]
    return {str(rect[0].text): float(rect.attrib["width"]) for rect in rects}


def test_segments_are_as_long_as_their_bytes_on_the_scale_of_the_largest_bar():
    small = MemoryBar("0", [Segment("weights", 10), Segment("buffers", 0)])
    svg = draw_bars([small, MemoryBar("1", [Segment("kv_cache", 20), Segment("cached", 20)], limit=80)])
    assert segments(svg) == {"weights: 10 B": 90.0, "KV cache: 20 B": 180.0, "cached: 20 B": 180.0}
    assert [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")] == [
        "0: 10 B",
        "1: 40 B of 80 B",
        "weights",
        "KV cache",
        "cached",
    ]


def test_a_bar_beyond_its_limit_sets_the_scale():
    assert segments(draw_bars([MemoryBar("0", [Segment("weights", 40)], limit=20)])) == {"weights: 40 B": 720.0}


@pytest.mark.parametrize("bars", [[], [MemoryBar("<model> & co", [])]])
def test_nothing_to_draw_and_names_with_markup_are_still_a_picture(bars):
    svg = draw_bars(bars)
    assert segments(svg) == {}
    assert [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")] == [f"{b.label}: 0 B" for b in bars]


def test_a_long_label_is_cut_before_the_sizes_and_kept_as_a_tooltip():
    label = "a model, " + "x" * 200
    (text,) = ElementTree.fromstring(draw_bars([MemoryBar(label, [])])).iter(f"{SVG}text")
    assert text.text is not None
    assert text.text.endswith("x...: 0 B")
    assert len(text.text) < 90
    assert text[0].text == label
