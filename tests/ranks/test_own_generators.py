"""Draws in a block are those of its own generators, to the bit what the process's would give; and move none of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from safe_loading._ranks.own_generators import OwnGenerators, own_copy_of_generators, own_generators

X = torch.linspace(-1, 1, 24).reshape(4, 6)
DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "rand": lambda: torch.rand(3, 2),
    "randn": lambda: torch.randn(3, dtype=torch.float64),
    "randint": lambda: torch.randint(3, 90, (8,)),
    "randint of one bound": lambda: torch.randint(90, (8,)),
    "randperm": lambda: torch.randperm(9),
    "rand_like": lambda: torch.rand_like(X),
    "randn_like": lambda: torch.randn_like(X, dtype=torch.float64),
    "randint_like": lambda: torch.randint_like(X, 3, 50),
    "normal": lambda: torch.normal(X, 2.0 + X),
    "normal_": lambda: torch.empty(5).normal_(1, 2),
    "uniform_": lambda: torch.empty(5).uniform_(1, 2),
    "random_": lambda: torch.empty(5).random_(),
    "bernoulli": lambda: torch.bernoulli(X.abs()),
    "bernoulli_": lambda: torch.empty(9).bernoulli_(0.3),
    "multinomial": lambda: torch.multinomial(X.abs(), 2),
    "exponential_": lambda: torch.empty(9).exponential_(),
    "poisson": lambda: torch.poisson(X.abs() * 9),
    "kaiming": lambda: torch.nn.init.kaiming_uniform_(torch.empty(4, 4)),
    "trunc_normal": lambda: torch.nn.init.trunc_normal_(torch.empty(40)),
    "orthogonal": lambda: torch.nn.init.orthogonal_(torch.empty(4, 4)),
    "dropout": lambda: functional.dropout(X, 0.4),
    "native_dropout": lambda: torch.native_dropout(X, 0.4, True)[0],
    "rrelu": lambda: functional.rrelu(X, training=True),
    "alpha_dropout": lambda: functional.alpha_dropout(X, 0.4, True),
    "attention": lambda: functional.scaled_dot_product_attention(*[X.reshape(1, 1, 4, 6)] * 3, dropout_p=0.4),
    "linear": lambda: torch.nn.Linear(3, 3).weight.detach(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_has_the_bits_of_the_process_and_does_not_move_it(name: str) -> None:
    torch.manual_seed(7)
    expected = [DRAWS[name]() for _ in range(2)]
    after = torch.get_rng_state()
    torch.manual_seed(1)
    process = torch.default_generator.get_state()
    with own_generators(OwnGenerators(7)):
        values = [DRAWS[name]() for _ in range(2)]
        state = torch.get_rng_state()
    assert all(map(torch.equal, values, expected))
    assert torch.equal(state, after)
    assert torch.equal(torch.default_generator.get_state(), process)
    assert torch.get_rng_state.__module__ == "torch.random"


def test_seeds_and_states_are_the_blocks_own() -> None:
    torch.manual_seed(3)
    process = torch.default_generator.get_state()
    with own_generators():
        assert torch.initial_seed() == 0
        torch.manual_seed(5)
        state, first = torch.get_rng_state(), torch.rand(2)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(9)
            inner = torch.rand(2)
        second = torch.rand(2)
        torch.set_rng_state(state)
        assert torch.equal(torch.rand(4), torch.cat([first, second]))
        assert torch.seed() == torch.initial_seed() != 5
    assert torch.equal(torch.default_generator.get_state(), process)
    torch.manual_seed(9)
    assert torch.equal(inner, torch.rand(2))


def test_a_block_may_begin_where_the_process_is() -> None:
    torch.manual_seed(3)
    torch.rand(5)
    with own_copy_of_generators():
        assert torch.initial_seed() == 3
        values = torch.rand(4)
    assert torch.equal(values, torch.rand(4))


def test_what_draws_nothing_and_what_is_given_a_generator_runs_as_it_is() -> None:
    with own_generators():
        own = torch.rand(3, generator=torch.Generator().manual_seed(1))
        assert torch.equal(own, torch.rand(3, generator=torch.Generator().manual_seed(1)))
        assert torch.empty(3, device="meta").normal_().is_meta
        assert torch.rand(3, device="meta").is_meta
        assert torch.equal(torch.native_dropout(X, 0.5, False)[0], X)
    assert torch.equal(OwnGenerators().draw(torch.ops.aten.add.Tensor, (X, X), {}), X + X)  # type: ignore[arg-type]
