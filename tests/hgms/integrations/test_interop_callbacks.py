"""Outer steps in training loops that are not ours, and in Lightning's: a closed form, and
trainings that go on from a file.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.helpers import F64, assert_same, rejects
from torch import Tensor, nn

from hgms.integrations import OuterSteps
from hgms.outer import Adam, Sgd
from hgms.runs import load_state, save_state
from hgms_core import ConfigError

AIM = torch.tensor([1.0, -2.0], dtype=F64)


def identity(_matvec: Any, b: Tensor) -> Tensor:
    return b


class Point(nn.Module):
    """The lower variable alone, and a layer whose presence says in which mode the model is."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(2, dtype=F64))
        self.frozen = nn.Parameter(torch.ones(1, dtype=F64), requires_grad=False)
        self.noise = nn.Dropout(0.5)


def f(_theta: Any, x: Any, batch: Tensor) -> Tensor:
    return 0.5 * (x["x"] - batch).square().sum()


def g(theta: Tensor, x: Any, _batch: Any) -> Tensor:
    return 0.5 * (x["x"] - theta).square().sum()


def outer(theta: Tensor, **fields: Any) -> OuterSteps:
    defaults = {
        "f": f,
        "g": g,
        "upper": [AIM],
        "lower": [None],
        "solver": identity,
        "every": 1,
        "optimizer": Sgd(lr=0.5),
    }
    return OuterSteps(theta=theta, **{**defaults, **fields})


class TestSteps:
    @pytest.mark.parametrize("optimizer", ["ours", "torch"])
    def test_theta_goes_where_the_closed_form_says(self, optimizer: str) -> None:
        """With x at its minimiser θ, each step of rate ½ halves the way to the aim."""
        theta = torch.tensor([5.0, 6.0], dtype=F64)
        model = Point()
        first = theta.clone()
        same = theta
        steps = Sgd(lr=0.5) if optimizer == "ours" else torch.optim.SGD([theta], lr=0.5)
        steps = outer(theta, optimizer=steps)
        for step in range(1, 5):
            model.x.data.copy_(theta)
            row = steps.step(model, step)
            torch.testing.assert_close(
                theta, AIM + (first - AIM) * 0.5**step, rtol=1e-13, atol=1e-14
            )
            assert row["outcome"] == "converged"
            assert row["moved"] == pytest.approx(0.5 * row["hypergradient_norm"])
            assert row["lower_gradient_norm"] == 0
        assert theta is same
        assert theta.grad is None
        assert len(steps.records) == 4

    def test_it_is_due_after_every_so_many_steps(self) -> None:
        steps = outer(torch.zeros(2, dtype=F64), every=3)
        assert [step for step in range(10) if steps.due(step)] == [3, 6, 9]

    def test_the_training_is_not_disturbed(self) -> None:
        """Modes of all modules, gradients, the global generator: as they were. Dropout is off
        meanwhile.
        """
        model = Point().train()
        theta = torch.zeros(2, dtype=F64)
        model.noise.eval()
        model.x.grad = torch.full((2,), 7.0, dtype=F64)
        seen = []

        def watching(theta: Tensor, x: Any, batch: Any) -> Tensor:
            seen.append(model.training)
            torch.rand(3)
            return g(theta, x, batch)

        upper = torch.utils.data.DataLoader([AIM] * 4, batch_size=1, shuffle=True)
        before = torch.get_rng_state()
        outer(theta, g=watching, upper=upper).step(model, 1)
        assert torch.equal(torch.get_rng_state(), before)
        assert seen
        assert not any(seen)
        assert (model.training, model.noise.training) == (True, False)
        assert model.x.grad.tolist() == [7.0, 7.0]

    def test_frozen_parameters_and_theta_in_the_model_are_no_lower_variables(self) -> None:
        model = Point()
        model.theta = nn.Parameter(torch.zeros(2, dtype=F64))
        names: set[str] = set()

        def watching(theta: Tensor, x: Any, batch: Any) -> Tensor:
            names.update(x)
            return g(theta, x, batch)

        row = outer(model.theta, g=watching).step(model, 1)
        assert names == {"x"}
        assert row["moved"] > 0
        assert model.theta.requires_grad

    def test_what_the_training_left_in_thetas_gradient_does_not_count(self) -> None:
        theta = torch.zeros(2, dtype=F64, requires_grad=True)
        theta.grad = torch.full((2,), 1e6, dtype=F64)
        outer(theta, optimizer=torch.optim.SGD([theta], lr=0.5)).step(Point(), 1)
        torch.testing.assert_close(theta.detach(), 0.5 * AIM)

    def test_a_hypergradient_that_is_not_finite_moves_nothing(self) -> None:
        theta = torch.zeros(2, dtype=F64)
        model = Point()
        steps = outer(
            theta, f=lambda theta, x, batch: f(theta, x, batch) + (theta * torch.nan).sum()
        )
        row = steps.step(model, 1)
        assert row["moved"] == 0
        assert theta.tolist() == [0.0, 0.0]

    def test_batches_are_gone_through_again_and_again_and_moved(self) -> None:
        seen = []

        def watching(_theta: Any, x: Any, batch: Any) -> Tensor:
            seen.append(batch["rows"][0].tolist())
            return f(_theta, x, batch["pair"][1])

        upper = [{"rows": [torch.tensor(i)], "pair": (i, AIM)} for i in range(3)]
        steps = outer(torch.zeros(2, dtype=F64), f=watching, upper=upper)
        for step in range(1, 6):
            steps.step(Point(), step)
        assert seen == [0, 1, 2, 0, 1]

    @pytest.mark.parametrize("optimizer", ["ours", "torch"])
    def test_it_goes_on_from_a_file(self, optimizer: str, tmp_path: Path) -> None:
        """Five steps, and three, a file, and two more, with a moment and the place among the
        batches to remember.
        """

        def made() -> tuple[Tensor, OuterSteps]:
            theta = torch.tensor([5.0, 6.0], dtype=F64)
            chosen = (
                Adam(lr=0.1)
                if optimizer == "ours"
                else torch.optim.RMSprop([theta], lr=0.1, momentum=0.9)
            )
            return theta, outer(theta, upper=[AIM, 2 * AIM, -AIM], optimizer=chosen)

        def go(theta: Tensor, steps: OuterSteps, numbers: range) -> None:
            model = Point()
            for step in numbers:
                model.x.data.copy_(theta)
                steps.step(model, step)

        whole = made()
        first = made()
        second = made()
        go(*whole, range(1, 6))
        go(*first, range(1, 4))
        save_state(tmp_path / "state.safetensors", first[1].state_dict())
        second[1].load_state_dict(load_state(tmp_path / "state.safetensors"))
        go(*second, range(4, 6))
        assert torch.equal(whole[0], second[0])
        assert whole[1].records == second[1].records

    def test_bad_input(self) -> None:
        theta = torch.zeros(2, dtype=F64)
        with rejects("wrong-type", "theta", of=ConfigError):
            outer(torch.zeros(2, dtype=torch.int64))
        with rejects("wrong-type", "theta", of=ConfigError):
            outer(theta.clone().requires_grad_() * 2)
        with rejects("wrong-value", "optimizer", of=ConfigError):
            outer(theta, optimizer=torch.optim.SGD([theta.clone()], lr=0.1))
        with rejects("wrong-type", "optimizer", of=ConfigError):
            outer(theta, optimizer="adam")
        with rejects("out-of-range", "every", of=ConfigError):
            outer(theta, every=0)
        with rejects("no-rows", "upper", of=ConfigError):
            outer(theta, upper=[]).step(Point(), 1)
        once = outer(theta, upper=(batch for batch in [AIM]))
        once.step(Point(), 1)
        with rejects("no-rows", "upper", of=ConfigError):
            once.step(Point(), 2)
        with rejects("no-parameters", "model", of=ConfigError):
            outer(theta).step(Point().requires_grad_(False), 1)
        with rejects("other-settings", "theta", of=ConfigError):
            outer(theta).load_state_dict(outer(torch.zeros(3, dtype=F64)).state_dict())
        with rejects("other-settings", "optimizer", of=ConfigError):
            outer(theta).load_state_dict(
                outer(theta, optimizer=torch.optim.SGD([theta], lr=0.1)).state_dict()
            )


class TestLightning:
    # The tests that fit ignore warnings: Lightning's advice on loaders, loggers and folders.
    @pytest.fixture(autouse=True)
    def _kept(self) -> Iterator[None]:
        pytest.importorskip("lightning")
        state = torch.get_rng_state()
        yield
        torch.set_rng_state(state)

    def fit(
        self,
        folder: Path,
        theta: Tensor,
        callback: Any,
        steps: int,
        resume: Path | None = None,
        accumulate: int = 1,
    ) -> tuple[Any, Any]:
        import lightning.pytorch as pl

        class Pull(pl.LightningModule):
            """x one step from wherever it is to θ: the training's own minimiser, at once."""

            def __init__(self) -> None:
                super().__init__()
                self.x = nn.Parameter(torch.zeros(2, dtype=F64))

            def training_step(self, batch: Tensor, _number: int) -> Tensor:
                return 0.5 * (self.x - theta.detach()).square().sum() + 0 * batch.sum()

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=1.0)

        data = torch.utils.data.DataLoader(torch.arange(8.0, dtype=F64), batch_size=2)
        trainer = pl.Trainer(
            max_steps=steps,
            accelerator="cpu",
            logger=pl.loggers.CSVLogger(folder),
            enable_checkpointing=False,
            callbacks=[callback],
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=1,
            accumulate_grad_batches=accumulate,
        )
        module = Pull()
        trainer.fit(
            module,
            data,
            ckpt_path=str(resume) if resume else None,
            weights_only=True if resume else None,
        )
        return trainer, module

    def callback(self, theta: Tensor, **fields: Any) -> Any:
        from hgms.integrations.lightning import HypergradientCallback

        defaults = {
            "f": f,
            "g": g,
            "upper": [AIM],
            "solver": identity,
            "every": 2,
            "optimizer": Sgd(lr=0.5),
        }
        return HypergradientCallback(theta=theta, **{**defaults, **fields})

    @pytest.mark.filterwarnings("ignore")
    def test_theta_goes_where_the_closed_form_says_and_is_logged(self, tmp_path: Path) -> None:
        theta = torch.tensor([5.0, 6.0], dtype=F64)
        first = theta.clone()
        mine = self.callback(theta)
        trainer, _ = self.fit(tmp_path, theta, mine, 6)
        torch.testing.assert_close(theta, AIM + (first - AIM) * 0.5**3, rtol=1e-13, atol=1e-14)
        assert [row["step"] for row in mine.records] == [2, 4, 6]
        written = Path(trainer.logger.log_dir, "metrics.csv").read_text().splitlines()
        assert "hgms/hypergradient_norm" in written[0]
        assert [row.split(",")[-1] for row in written] == ["step", "2", "4", "6"]

    @pytest.mark.filterwarnings("ignore")
    def test_g_sees_the_batch_of_the_training_step(self, tmp_path: Path) -> None:
        seen: list[list[float]] = []

        def watching(theta: Tensor, x: Any, batch: Tensor) -> Tensor:
            seen.append(batch.tolist())
            return g(theta, x, batch)

        theta = torch.zeros(2, dtype=F64)
        self.fit(tmp_path, theta, self.callback(theta, g=watching), 4)
        assert {tuple(batch) for batch in seen} == {(2.0, 3.0), (6.0, 7.0)}

    @pytest.mark.filterwarnings("ignore")
    def test_accumulated_batches_are_one_step(self, tmp_path: Path) -> None:
        theta = torch.zeros(2, dtype=F64)
        mine = self.callback(theta)
        self.fit(tmp_path, theta, mine, 4, accumulate=2)
        assert [row["step"] for row in mine.records] == [2, 4]

    @pytest.mark.filterwarnings("ignore")
    def test_its_checkpoints_hold_theta(self, tmp_path: Path) -> None:
        def made() -> tuple[Tensor, Any]:
            theta = torch.tensor([5.0, 6.0], dtype=F64)
            return theta, self.callback(theta, optimizer=Adam(lr=0.3), upper=[AIM, 2 * AIM, -AIM])

        whole, mine = made()
        self.fit(tmp_path, whole, mine, 8)
        first, before = made()
        trainer, _ = self.fit(tmp_path, first, before, 4)
        trainer.save_checkpoint(tmp_path / "half.ckpt")
        second, after = made()
        self.fit(tmp_path, second, after, 8, resume=tmp_path / "half.ckpt")
        assert torch.equal(second, whole)
        assert after.records == mine.records

    def test_the_class_can_be_pickled_and_is_lightnings(self) -> None:
        import lightning.pytorch as pl

        import hgms.integrations.lightning as module

        assert issubclass(module.HypergradientCallback, pl.Callback)
        assert (
            pickle.loads(pickle.dumps(module.HypergradientCallback)) is module.HypergradientCallback
        )

    def test_several_processes_are_refused(self) -> None:
        class Many:
            world_size = 2

        with rejects("not-supported", of=ConfigError) as caught:
            self.callback(torch.zeros(2)).on_fit_start(Many, None)
        assert "2" in caught.value.message


def test_neither_package_is_imported_unless_it_is_used() -> None:
    import subprocess
    import sys

    code = (
        "import sys, hgms.integrations, hgms.integrations.lightning, hgms.integrations.trainer\n"
        "print(sorted({'lightning', 'pytorch_lightning', 'transformers', 'scipy', "
        "'linear_operator'} & set(sys.modules)))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert shown.stdout.strip() == "[]"


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    import hgms.integrations.lightning
    import hgms.integrations.trainer

    for module in (hgms.integrations.lightning, hgms.integrations.trainer):
        with pytest.raises(AttributeError, match="no attribute 'HypergradientCallbak'"):
            _ = module.HypergradientCallbak


def test_theta_may_be_a_dictionary() -> None:
    theta = {"a": torch.zeros(2, dtype=F64), "b": torch.zeros((), dtype=F64)}

    def lower(upper: Any, x: Any, _batch: Any) -> Tensor:
        return 0.5 * (x["x"] - upper["a"] - upper["b"]).square().sum()

    model = Point()
    optimizer = torch.optim.SGD(list(theta.values()), lr=0.5)
    steps = outer(theta, g=lower, optimizer=optimizer)  # type: ignore[arg-type]
    steps.step(model, 1)
    assert_same(theta, {"a": 0.5 * AIM, "b": 0.5 * AIM.sum()}, rtol=1e-13)
