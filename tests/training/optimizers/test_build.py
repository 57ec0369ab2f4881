import torch

from byov.training.optimizers import build


def test_optimizer_state_round_trip() -> None:
    def make() -> tuple[torch.nn.Linear, torch.optim.AdamW]:
        torch.manual_seed(0)
        layer = torch.nn.Linear(3, 2)
        return layer, torch.optim.AdamW(layer.parameters(), lr=0.1)

    def step(layer: torch.nn.Linear, optimizer: torch.optim.AdamW) -> None:
        optimizer.zero_grad()
        layer(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    layer, optimizer = make()
    step(layer, optimizer)
    twin, other = make()
    twin.load_state_dict(layer.state_dict())
    kept = {k: v.clone() for k, v in build.optimizer_tensors(optimizer).items()}  # as a file would
    build.load_optimizer_tensors(other, kept)
    step(layer, optimizer)
    step(twin, other)
    assert torch.equal(layer.weight, twin.weight)
