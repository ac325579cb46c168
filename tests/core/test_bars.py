"""The bars of memory: lengths on one scale, text escaped, sizes at the right, nothing drawn for nothing."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from safe_loading._core.bars import Mark, MemoryBar, Segment, draw_bars

SVG = "{http://www.w3.org/2000/svg}"


def segments(svg: str) -> dict[str, float]:
    """The width of each segment by its title; frames and the legend have none."""
    rects = [rect for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect") if len(rect)]
    return {str(rect[0].text): float(rect.attrib["width"]) for rect in rects}


def texts(svg: str) -> list[tuple[str | None, bool]]:
    """The texts in their order, each with whether it ends at its place rather than starting there."""
    found = ElementTree.fromstring(svg).iter(f"{SVG}text")
    return [(text.text, text.get("text-anchor") == "end") for text in found]


def test_segments_are_as_long_as_their_bytes_on_the_scale_of_the_largest_bar():
    small = MemoryBar("card 0", [Segment("weights", 10), Segment("buffers", 0)])
    large = MemoryBar("card 1", [Segment("kv_cache", 20), Segment("cached", 20)], limit=80, contents="layers 0-3")
    svg = draw_bars([small, large], title="Llama")
    assert segments(svg) == {"weights: 10 B": 60.0, "KV cache: 20 B": 120.0, "cached: 20 B": 120.0}
    assert texts(svg) == [
        ("Llama", False),
        ("card 0", False),
        ("10 B", True),
        ("card 1", False),
        ("40 B of 80 B, 40 B free", True),
        ("layers 0-3", False),
        ("card 0", True),  # the legend: a column of sizes for each bar
        ("card 1", True),
        ("weights", False),
        ("10 B", True),
        ("-", True),
        ("KV cache", False),
        ("-", True),
        ("20 B", True),
        ("cached", False),
        ("-", True),
        ("20 B", True),
    ]


def test_a_bar_beyond_its_limit_sets_the_scale_and_says_what_is_too_much():
    svg = draw_bars([MemoryBar("0", [Segment("weights", 40)], limit=20)])
    assert segments(svg) == {"weights: 40 B": 480.0}
    assert ("40 B of 20 B, 20 B too much", True) in texts(svg)


def test_one_step_on_several_cards_is_one_column_and_many_bars_have_none():
    step = [Segment("weights", 40)]
    legend = [("weights", False), ("40 B", True)]
    assert texts(draw_bars([MemoryBar("a", step, 50), MemoryBar("b", step, 60)]))[4:] == legend
    many = [MemoryBar(str(size), [Segment("weights", size)]) for size in range(1, 9)]
    assert texts(draw_bars(many))[16:] == [("weights", False)]


def test_a_file_follows_the_color_scheme_and_a_part_of_a_page_its_text_color():
    bar = [MemoryBar("0", [Segment("weights", 40)], limit=50)]
    assert "prefers-color-scheme:dark" in draw_bars(bar)
    inline = draw_bars(bar, inline=True)
    assert "<style>" not in inline, "it would color the whole page"
    assert 'fill="currentColor"' in inline


@pytest.mark.parametrize("bars", [[], [MemoryBar("<model> & co", [])]])
def test_nothing_to_draw_and_names_with_markup_are_still_a_picture(bars):
    svg = draw_bars(bars, title="<b>")
    assert segments(svg) == {}
    assert texts(svg) == [("<b>", False), *(text for b in bars for text in ((b.label, False), ("0 B", True)))]


@pytest.mark.parametrize("part", ["label", "contents"])
def test_what_is_too_long_is_cut_and_kept_as_a_tooltip(part):
    long = "a model, " + "x" * 200
    bar = MemoryBar(**{"label": "0", "segments": [], part: long})
    (text,) = (found for found in ElementTree.fromstring(draw_bars([bar])).iter(f"{SVG}text") if len(found))
    assert text.text is not None
    assert text.text.endswith("x...")
    assert len(text.text) < 70
    assert text[0].text == long


def test_the_lines_of_cards_go_through_the_bars_and_through_no_text():
    bars = [MemoryBar(f"step {number}", [Segment("weights", 40 + number)], contents="layers") for number in range(3)]
    svg = ElementTree.fromstring(draw_bars(bars, [Mark("L4", 20), Mark("L40S", 30)], title="Llama"))
    baselines = {text.text: float(text.attrib["y"]) for text in svg.iter(f"{SVG}text")}
    tops = [float(rect.attrib["y"]) for rect in svg.iter(f"{SVG}rect") if len(rect)]
    for path, own in zip(svg.iter(f"{SVG}path"), ("L4: 20 B", "L40S: 30 B"), strict=True):
        pieces = [tuple(map(float, piece.split(" ")[1].split("V"))) for piece in path.attrib["d"].split("M")[1:]]
        crossed = {text for text, y in baselines.items() for top, bottom in pieces if top < y <= bottom}
        assert crossed == {own}
        assert all(any(top <= bar and bar + 24 <= bottom for top, bottom in pieces) for bar in tops)
