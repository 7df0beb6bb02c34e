"""What Python says where a component, a budget or a setting is built wrongly: the same as a
configuration file would be told. (Problems, data, pipelines and hypergradients:
test_python_input.py. Every field of every class: test_python_fields.py.)
"""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import pytest
from attrs import field
from support.helpers import rejects
from support.python_names import rejected, written

from hgms_core import ConfigError, component
from hgms_core.validators import positive

REFUSED = """
Branches(count=2.5) -> wrong-type count
Branches(count=0) -> out-of-range count
Branches(batch_size=64.5) -> wrong-type batch_size
CG(ridge='1e-3') -> wrong-type ridge
CG(ridge=-1.0) -> out-of-range ridge
CG(rtol=math.nan) -> not-finite rtol
CG(rtol=1 + 2j) -> wrong-type rtol
Adam(lr=[0.1]) -> wrong-type lr
Ula(temperature=10**400) -> out-of-range temperature
Adam(betas=0.9) -> wrong-type betas
Adam(betas=(0.9, 0.99, 0.999)) -> wrong-length betas
Adam(betas=(0.9, '0.99')) -> wrong-type betas.1
Adam(betas=(0.9, 1.0)) -> out-of-range betas.1
Diversity(lr_spread=(2, 1)) -> wrong-value lr_spread
HyperCleaning(validation_split=(0.5, 0.5)) -> wrong-length validation_split
Implicit(solver=CG(), strategy='vpj') -> unknown-choice strategy
Implicit(solver=CG(), strategy=None) -> wrong-type strategy
Branches(optimizer=3) -> wrong-type optimizer
Branches(keep_path=1) -> wrong-type keep_path
HyperCleaning(dataset='minst') -> wrong-value dataset
TorchOptimizer(optimizer='RAdm') -> unknown-optimizer optimizer
TorchOptimizer(settings={'lrr': 0.1}) -> unknown-option settings.lrr
TorchOptimizer(settings=0.1) -> wrong-type settings
Branches(optimizer='sgd') -> wrong-type optimizer
Branches(cuont=3) -> unknown-option cuont
Branches(learning_rate=0.1) -> unknown-option learning_rate
Branches(4, 20) -> positional-argument
First('x') -> positional-argument
Implicit() -> missing-option solver
Implicit(solvr=CG()) -> unknown-option solvr
Implicit(solver='cg') -> wrong-part solver
Split(upper=torch.optim.SGD, start=Adam()) -> wrong-part upper
Search(low=0.0, high=1.0, generator=First(), selector=First()) -> wrong-part generator
evolve(pipeline, outer=torch.optim.Adam) -> wrong-part outer
evolve(pipeline, generator=CG) -> wrong-part generator
Adam(schedule='cosine') -> wrong-type schedule
Adam(schedule={'kind': 'cosine'}) -> wrong-type schedule
Adam(schedule=Schedule(kind='cosin')) -> unknown-choice kind
Adam(schedule=Schedule(knid='cosine')) -> unknown-option knid
Projection(kind='box', low=1.0, high=0.0) -> out-of-range high
Tilted(method='hg-ms', tilt=1.0) -> wrong-part method
Tilted(method=pipeline) -> missing-option tilt
Tilted(method=pipeline, tilt=-1) -> out-of-range tilt
Tilted(method=RegMix(), tilt=1) -> wrong-value method
ValidationOnly(method='uniform') -> wrong-part method
LearnedStart(method=pipeline) -> not-supported learn_start
StartingAt(method=pipeline, mixture=[3, 1]) -> wrong-type mixture
StartingAt(method=pipeline, mixture={'code': '3'}) -> wrong-type mixture.code
BaseModel(path='gpt2', dtype=torch.bfloat16) -> wrong-type dtype
Lora(targets='q_proj') -> wrong-type targets
Budget('3 stps') -> wrong-budget
Budget(steps=3) -> unknown-option steps
Budget(outer_steps=3.0) -> wrong-type outer_steps
Budget(seconds=-1) -> out-of-range seconds
RunSettings(evalute_every=3) -> unknown-option evalute_every
RunSettings(device=0) -> wrong-type device
RunSettings(device='gpu') -> wrong-value device
RunSettings(dtype=torch.float64) -> wrong-type dtype
RunSettings(compile='yes') -> wrong-type compile
RunSettings(track='wandb') -> wrong-type track
run('hg-mss', problem, '2 steps') -> unknown-method method
run(Pipeline, problem, '2 steps') -> wrong-part method
run(CG(), problem, '2 steps') -> wrong-part method
run(problem, pipeline, '2 steps') -> wrong-type problem
run(pipeline, 'quadratic', '2 steps') -> wrong-type problem
run({'nam': 'hg-ms'}, problem, '2 steps') -> missing-option method.name
run({'name': 'hg-ms', 'outer': {'lrr': 1}}, problem, '2 steps') -> unknown-option method.outer.lrr
run('hg-ms', problem, '2 stps') -> wrong-budget budget
run('hg-ms', problem, 2) -> wrong-type budget
run('hg-ms', problem) -> missing-option budget
run('hg-ms', problem, '2 steps', sed=1) -> unknown-option sed
run('hg-ms', problem, '2 steps', method='uniform') -> positional-argument method
run('hg-ms', problem, '2 steps', 1) -> positional-argument
run('hg-ms', problem, '2 steps', seed=-1) -> out-of-range seed
run('hg-ms', problem, '2 steps', seed=1.5) -> wrong-type seed
run('hg-ms', problem, '1 s', settings={'evry': 2}) -> unknown-option settings.evry
run('hg-ms', problem, '2 steps', settings=2) -> wrong-type settings
run('hg-ms', problem, '2 steps', folder=3) -> wrong-type folder
run('hg-ms', problem, '2 steps', resume='yes') -> wrong-type resume
run('hg-ms', problem, '2 steps', watch='loss') -> wrong-type watch
run('uniform', problem, '1 s', watch=lambda record: 0) -> wrong-signature watch
compare('quadratc', 'uniform', '2 steps') -> unknown-task problems.quadratc.name
compare(pipeline, problem, '2 steps') -> wrong-part problems
compare(lambda seed: 3, 'uniform', '2 steps') -> wrong-result problem
compare(problem, CG(), '2 steps') -> wrong-part methods
compare(problem, ['uniform', 'hg-mss'], '2 steps') -> unknown-method methods.hg-mss.name
compare(problem, 'uniform', '2 stps') -> wrong-budget budget
compare(problem, 'uniform', '2 steps', seeds=-1) -> out-of-range seeds
compare(problem, 'uniform', '2 steps', seeds=1.5) -> wrong-type seeds
compare(problem, 'uniform', '2 steps', seeds=[0, 0]) -> wrong-value seeds
compare(problem, 'uniform', '2 steps', metod='x') -> unknown-option metod
compare(problem, 'uniform', '2 steps', metric='acuracy') -> unknown-metric problem.metric
compare('quadratic', 'uniform', '2 steps', metric='valu') -> unknown-metric metric
compare(problem, 'uniform', '2 steps', reference='unifrom') -> unknown-method reference
compare(problem, 'uniform', '2 steps', run={'evalute_every': 2}) -> unknown-option run.evalute_every
compare(problem, 'uniform', '2 steps', jobs='2') -> wrong-type jobs
compare(problem, 'uniform', '2 steps', out=3) -> wrong-type out
compare(problem, 'uniform', '2 steps', registry='mine.py') -> wrong-type registry
RunFolder(3) -> wrong-type path
RunFolder() -> missing-option path
outer_steps(evry=3) -> unknown-option evry
outer_steps(every=2.5) -> wrong-type every
outer_steps(every=0) -> out-of-range every
outer_steps(solver='cg') -> wrong-part solver
outer_steps(optimizer='adam') -> wrong-part optimizer
outer_steps(f=lambda x: x) -> wrong-signature f
outer_steps(g=0.5) -> wrong-type g
outer_steps(upper=3) -> wrong-type upper
outer_steps(strategy='vpj') -> unknown-choice strategy
lower_solution(loss, torch.ones(2), torch.ones(2), solver=CG(), report=3) -> wrong-type report
"""
"""What is written -> the code and the place of the error."""
ROWS = [line.rpartition(" -> ")[::2] for line in REFUSED.strip().splitlines()]

# what is written, and the codes and places of all errors
SEVERAL: list[tuple[str, list[tuple[str, tuple[str, ...]]]]] = [
    ("Split(upper=Adam, start=CG())", [("wrong-part", ("upper",)), ("wrong-part", ("start",))]),
    (
        "SourceMixture(sources={}, validation={}, model=3)",
        [
            ("missing-option", ("sources",)),
            ("missing-option", ("validation",)),
            ("wrong-type", ("model",)),
        ],
    ),
    (
        "SGD(moments='keep', lr=math.nan, weight_decay=-1, momentum=2)",
        [
            ("unknown-choice", ("moments",)),
            ("not-finite", ("lr",)),
            ("out-of-range", ("weight_decay",)),
            ("out-of-range", ("momentum",)),
        ],
    ),
    (
        "RunConfig(task=Quadratic, method='hg-ms', budget='3 stps', seed=-1)",
        [
            ("wrong-part", ("task",)),
            ("wrong-part", ("method",)),
            ("wrong-budget", ("budget",)),
            ("out-of-range", ("seed",)),
        ],
    ),
    (
        "compare('uniform', 'quadratic', '2 steps')",
        [
            ("unknown-task", ("problems", "uniform", "name")),
            ("unknown-method", ("methods", "quadratic", "name")),
        ],
    ),
    (
        "OuterSteps(f=loss)",
        [
            ("missing-option", ("g",)),
            ("missing-option", ("upper",)),
            ("missing-option", ("theta",)),
            ("missing-option", ("solver",)),
            ("missing-option", ("optimizer",)),
        ],
    ),
]

TAKEN = [
    ("Branches(count=np.int64(3))", "Branches(count=3)"),
    ("SGD(lr=np.float32(0.5))", "SGD(lr=0.5)"),
    ("Diversity(lr_spread=[0.5, 2])", "Diversity(lr_spread=(0.5, 2.0))"),
    ("Diversity(lr_spread=np.array([0.5, 2]))", "Diversity(lr_spread=(0.5, 2.0))"),
    ("Adam(lr=1, betas=torch.tensor([0.5, 0.75]))", "Adam(lr=1.0, betas=(0.5, 0.75))"),
    ("CG(max_steps=torch.tensor(7), ridge=torch.tensor(0.5))", "CG(max_steps=7, ridge=0.5)"),
    (
        "HyperCleaning(validation_split=[0.6, 0.2, 0.2])",
        "HyperCleaning(validation_split=(0.6, 0.2, 0.2))",
    ),
    (
        "TorchOptimizer(settings={'betas': [np.float64(0.5), 0.9]})",
        "TorchOptimizer(settings={'betas': (0.5, 0.9)})",
    ),
    ("BaseModel(path=Path('models') / 'small')", "BaseModel(path='models/small')"),
    ("RunSettings(out=Path('elsewhere'))", "RunSettings(out='elsewhere')"),
    ("Budget('3 steps')", "Budget(outer_steps=3)"),
    ("Budget(Budget('1 min'))", "Budget(seconds=60.0)"),
    ("Budget(outer_steps=np.int64(3))", "Budget(outer_steps=3)"),
    ("RunConfig(task=Quadratic(), method=pipeline, budget='3 steps').budget", "Budget('3 steps')"),
]


@pytest.mark.parametrize(("source", "said"), ROWS, ids=[source for source, _ in ROWS])
def test_wrong_input_is_an_error_with_a_code_and_a_place(source: str, said: str) -> None:
    error = rejected(source)
    assert f"{error.code} {'.'.join(map(str, error.place))}".strip() == said


@pytest.mark.parametrize(("source", "errors"), SEVERAL, ids=[source for source, _ in SEVERAL])
def test_all_errors_are_reported_at_once(
    source: str, errors: list[tuple[str, tuple[str, ...]]]
) -> None:
    assert [(error.code, error.place) for error in rejected(source).errors] == errors


@pytest.mark.parametrize(("code", "same"), TAKEN, ids=[code for code, _ in TAKEN])
def test_what_is_taken(code: str, same: str) -> None:
    value = written(code)
    expected = written(same)
    assert value == expected
    assert repr(value) == repr(expected)  # the same types, too


def test_the_table_of_the_page_says_the_same() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "messages.md"
    text = page.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+\(.*\))` \| (.*) \|$", text, re.MULTILINE)
    assert len(rows) >= 13
    said = {code: "; ".join(rejected(code).lines())[: len(message)] for code, message in rows}
    assert said == dict(rows)


# --- classes of other people
# --------------------------------------------------------------------------------------------------


@component
class Mine:
    """As a third party writes one: a class of attrs with one import of ours."""

    lr: float = field(default=0.1, validator=positive)
    later: NotImported | None = None  # type: ignore[name-defined]  # noqa: F821
    at: int = field(default=0, converter=int)

    @lr.validator
    def _small(self, _attribute: object, value: float) -> None:
        if value > 1:
            raise ValueError(f"'lr' must be small: {value}")


def test_a_class_of_somebody_else() -> None:
    with rejects("unknown-option", "lrr", of=ConfigError) as caught:
        Mine(lrr=3)  # type: ignore[call-arg]
    assert caught.value.did_you_mean == ("lr",)
    with rejects("wrong-value", "lr", of=ConfigError):
        Mine(lr=3)
    assert Mine(later=object(), at="3").at == 3
    assert attrs.evolve(Mine(), lr=0.5) == Mine(lr=0.5)
    assert hash(Mine()) == hash(Mine())
