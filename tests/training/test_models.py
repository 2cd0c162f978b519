"""The recipes' networks: their shapes and sizes, and what each computes beside another way of computing it."""

import math

import pytest
import torch
from torch import nn

from shoal.models.decoder import Attention, Decoder
from shoal.models.forecaster import Forecaster
from shoal.models.lenet import LeNet
from shoal.models.perceptron import Perceptron

# float32 sums over at most 400 products, in another order
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_lenet_has_the_papers_size_where_every_map_sees_every_other() -> None:
    assert num_parameters(LeNet()) == 61_706
    assert LeNet()(torch.randn(3, 1, 28, 28)).shape == (3, 10)


def test_lenet_pools_first_and_computes_what_rectifying_first_does() -> None:
    model, images = LeNet(), torch.randn(4, 1, 28, 28)
    x = images
    for layer in (model.conv1, model.conv2):
        x = nn.functional.max_pool2d(layer(x).relu(), 2)
    x = model.linear1(x.flatten(1)).relu()
    assert torch.allclose(model(images), model.output(model.linear2(x).relu()), **TOLERANCE)


def test_the_perceptron_without_hidden_layers_is_linear() -> None:
    assert num_parameters(Perceptron(30, 2, hidden=[])) == 62
    wide = Perceptron(30, 2, hidden=[8, 4], dropout=0.5).eval()
    rows = torch.randn(5, 30)
    by_hand = nn.functional.gelu(wide.linear2(nn.functional.gelu(wide.linear1(rows))))
    assert torch.allclose(wide(rows), wide.output(by_hand), **TOLERANCE)
    assert not torch.equal(wide.train()(rows), wide(rows))  # dropout draws


def test_the_forecaster_begins_with_a_forecast_of_zero_and_depends_on_the_whole_window() -> None:
    model = Forecaster(num_inputs=3, horizon=6, hidden=8, depth=2)
    windows = torch.randn(4, 10, 3, requires_grad=True)
    assert torch.equal(model(windows), torch.zeros(4, 6))
    nn.init.normal_(model.forecast.linear.weight)
    model(windows).sum().backward()
    assert (windows.grad.abs().sum(-1) > 0).all()


def test_attention_is_the_papers_equation_under_a_causal_mask() -> None:
    attention, x = Attention(width=8, heads=2, depth=1), torch.randn(3, 5, 8)
    later = torch.ones(5, 5).triu(1).bool()
    heads = []
    for head in range(2):
        columns = slice(4 * head, 4 * head + 4)
        query, key, value = (layer(x)[..., columns] for layer in (attention.query, attention.key, attention.value))
        scores = (query @ key.transpose(1, 2) / math.sqrt(4)).masked_fill(later, -math.inf)
        heads.append(scores.softmax(-1) @ value)
    assert torch.allclose(attention(x), attention.output(torch.cat(heads, -1)), **TOLERANCE)


def test_ranks_that_hold_half_of_the_heads_each_sum_to_the_whole() -> None:
    whole, x = Attention(width=8, heads=2, depth=1), torch.randn(3, 5, 8)
    total = whole.output.bias.expand(3, 5, 8).clone()
    for part in (slice(0, 4), slice(4, 8)):
        half = Attention(width=8, heads=2, depth=1)
        for name in ("query", "key", "value"):
            mine, theirs = getattr(half, name), getattr(whole, name)
            mine.weight, mine.bias = nn.Parameter(theirs.weight[part]), nn.Parameter(theirs.bias[part])
        half.output.weight, half.output.bias = nn.Parameter(whole.output.weight[:, part]), None
        total += half(x)
    assert torch.allclose(whole(x), total, **TOLERANCE)


def test_the_decoder_never_looks_ahead_but_looks_back() -> None:
    model = Decoder(num_tokens=16, context=8, width=16, depth=2, heads=4)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    tokens = torch.randint(0, 16, (2, 8))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 16
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 8, 16)
    assert torch.allclose(before[:, :5], after[:, :5], **TOLERANCE)
    assert ((before - after).abs().amax(-1)[:, 5:] > 1e-3).all()


def test_the_decoder_begins_near_a_uniform_guess() -> None:
    logits = Decoder(num_tokens=64, context=8, width=32)(torch.randint(0, 64, (4, 8)))
    targets = torch.randint(0, 64, (32,))
    assert nn.functional.cross_entropy(logits.flatten(0, 1), targets).item() == pytest.approx(math.log(64), abs=0.1)


def test_without_positions_the_order_of_what_came_before_is_lost_on_one_block() -> None:
    swapped = torch.tensor([[1, 2, 3], [2, 1, 3]])
    model = Decoder(num_tokens=8, context=4, width=16, depth=1, heads=2, positions=False)
    first, second = model(swapped)[:, -1]
    assert torch.allclose(first, second, **TOLERANCE)
    first, second = Decoder(num_tokens=8, context=4, width=16, depth=1, heads=2)(swapped)[:, -1]
    assert not torch.allclose(first, second, **TOLERANCE)


def test_tied_tables_are_one_parameter() -> None:
    apart, tied = (Decoder(num_tokens=32, context=4, width=8, heads=2, tied=tied) for tied in (False, True))
    assert num_parameters(apart) - num_parameters(tied) == 32 * 8
    tied(torch.randint(0, 32, (1, 4))).sum().backward()
    assert tied.embedding.token.weight.grad is tied.head.output.weight.grad


def test_a_width_that_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="width 10 cannot be divided into 4 heads"):
        Decoder(width=10, heads=4)


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (LeNet(), torch.randn(2, 1, 28, 28)),
        (Perceptron(5, 2), torch.randn(2, 5)),
        (Forecaster(3, 4, hidden=8), torch.randn(2, 6, 3)),
        (Decoder(num_tokens=8, context=6, width=8, heads=2), torch.randint(0, 8, (2, 6))),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_network_can_be_cut_between_any_two_layers(model: nn.Sequential, inputs: torch.Tensor) -> None:
    for cut in range(1, len(model)):
        first, second = nn.Sequential(*list(model)[:cut]), nn.Sequential(*list(model)[cut:])
        between = first(inputs)
        assert isinstance(between, torch.Tensor)
        assert between.is_floating_point()
        assert torch.equal(second(between), model(inputs))
