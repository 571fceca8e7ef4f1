"""One audit under way: cuts a step into tasks, has them done, and stores what comes back."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor, nn

from holdfast.attacks.core.nature import Nature
from holdfast.audits.engine import Engine
from holdfast.audits.inputs import to_model
from holdfast.audits.live import Live
from holdfast.audits.plan import Step
from holdfast.audits.rows import Example, Key, Outcome
from holdfast.audits.side import Side
from holdfast.audits.store import NUMBER, Store
from holdfast.audits.task import Stage, Task
from holdfast.errors import SoundnessError
from holdfast.registry import get
from holdfast.utils import clock
from holdfast.utils.progress import Searched, heard_by
from holdfast.utils.resume import save_arrays

LEARNED = 250  # inputs that an attack may learn from: a few seconds for a small network


@dataclass(frozen=True, eq=False)
class Job:
    """What all steps of an audit share.

    Attributes:
        model: from (B, ...) to logits (B, K).
        x: all inputs.
        y: their labels.
        sides: the threats.
        store: where results are kept as they come.
        engine: where tasks are done.
        bars: shown to the user.
        live: shown to whoever looks at the folder.
        seed: fixes every random choice.
        batch_size: inputs worked on, and stored, at a time.
        folder: folder of the run, or None if the user keeps none.
        alpha: probability that a proof is wrong, where it is not zero.
        nature: what is known of the model.
        draws: passes that make up one prediction of a model that draws random numbers; 0 for any other.
    """

    model: nn.Module
    x: Tensor
    y: Tensor
    sides: tuple[Side, ...]
    store: Store
    engine: Engine
    bars: Progress
    live: Live
    seed: int
    batch_size: int
    folder: Path | None
    alpha: float | None = None
    nature: Nature = Nature()  # noqa: RUF009  (frozen)
    draws: int = 0

    def take(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and labels at these positions, where the model is and in its dtype."""
        return to_model(self.model, self.x[index], self.y[index])

    def run(self, key: Key, step: Step | None, side: Side, wanted: list[int]) -> dict[int, Outcome]:
        """Do one step at one level for the wanted inputs that are not stored yet; return all their stored outcomes.

        None as the step classifies the unchanged inputs. No batch is begun after the deadline.
        """
        todo = self._batches(step, wanted, self.store.outcomes(key))
        name, row = ("clean", "clean") if step is None else (step.name, f"{step.name}{NUMBER}{key.step}")
        text = f"{name} {side.levels[key.level - 1]}" if key.level else name
        done = len(wanted) - sum(map(len, todo))
        bar = self.bars.add_task(text, total=len(wanted), completed=done)
        mark = clock.now()

        def tasks() -> Iterator[Task]:
            for positions in todo:
                if clock.over():
                    return
                yield self._task(step, side, key.level, torch.tensor(positions))

        def hear(state: Searched) -> None:
            self.bars.update(bar, description=f"{text}, {state}")
            self.show(f"{text}, {state}", done, len(wanted))

        with heard_by(hear):
            for _, found in self.engine(self.model, tasks()):
                for outcome in found.outcomes:
                    self.note(step.stage if step else "clean", side, outcome, found.examples)
                now = clock.now()
                wall, mark = min(found.seconds, now - mark), now
                self.store.add(key, row, found.outcomes, found.examples, seconds=found.seconds, wall=wall)
                if found.rough:
                    self.store.note_rough()
                done += len(found.outcomes)
                self.bars.advance(bar, len(found.outcomes))
                self.show(text, done, len(wanted))
        after = self.store.outcomes(key)
        return {position: after[position] for position in wanted if position in after}

    def note(self, stage: Stage, side: Side, outcome: Outcome, examples: Sequence[Example] = ()) -> None:
        """Take up what was found; stop with the evidence if it breaks what is proved."""
        side.note(stage, outcome)
        if side.contradicted(outcome.position):
            raise self._unsound(side, outcome.position, examples)

    def show(self, step: str, done: int, total: int) -> None:
        """Tell whoever looks at the folder how far the run has come."""
        self.live.show(step=step, done=done, total=total, **self._so_far())

    def finish(self) -> None:
        """Tell them that it has ended."""
        self.live.end("finished", **self._so_far())

    def _so_far(self) -> dict[str, object]:
        return {"seconds": self.store.wall(), "brackets": [side.so_far(len(self.x)) for side in self.sides]}

    def _batches(self, step: Step | None, wanted: list[int], stored: dict[int, Outcome]) -> list[list[int]]:
        """Cut before what is stored is left out: a killed run goes on with the batches that it would have had."""
        most = min(self.batch_size, (step and step.batch) or self.batch_size)
        chunks = [wanted[start : start + most] for start in range(0, len(wanted), most)]
        return [left for chunk in chunks if (left := [p for p in chunk if p not in stored])]

    def _task(self, step: Step | None, side: Side, level: int, index: Tensor) -> Task:
        x, y = self.take(index)
        if step is None:
            return Task("clean", "", {}, self.seed, None, index, x, y, draws=self.draws)
        radii = side.sizes[: level - 1] if step.settles_all_levels else ()
        threat, options = side.levels[level - 1].select(index), dict(step.options)
        if step.stage == "attack" and "data" in get("attack", step.method).options:
            options["data"] = self.take(torch.arange(min(LEARNED, len(self.x))))[0]
        size = side.sizes[level - 1]
        how: dict[str, Any] = {"size": size, "radii": radii, "draws": self.draws, "seconds": clock.left()}
        return Task(step.stage, step.method, options, self.seed, threat, index, x, y, **how)

    def _unsound(self, side: Side, position: int, found: Sequence[Example]) -> SoundnessError:
        """The error for a certified input that was broken; puts the evidence into a file first."""
        (radius, certificate), outcome = side.proved[position], side.broken[position]
        folder = Path(tempfile.mkdtemp(prefix="holdfast-")) if self.folder is None else self.folder
        path = folder / f"soundness-{position}.npz"
        examples = (*found, *self.store.examples(side.number, [position]))
        arrays = next(({"x": e.x, "x_adv": e.x_adv} for e in examples if e.position == position), {})
        about = {"label": int(self.y[position]), "threat": str(side.threat), "certified": radius}
        try:
            save_arrays(path, {**arrays, **about, "broken": outcome.size})
            kept = f"the evidence is in '{path}'"
        except OSError as error:
            kept = f"the evidence could not be kept: {error}"
        excuse = f"the proof is wrong with probability {self.alpha:g}; if you see it twice, " if self.alpha else ""
        return SoundnessError(
            f"input {position} is certified by '{certificate}' up to {radius:.6g} in {side.threat.name}, but the "
            f"attack '{outcome.by}' broke it with an example of size {outcome.size:.6g}. One of the two is wrong: "
            f"{excuse}this is a bug in Holdfast, please report it; {kept}."
        )
