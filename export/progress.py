"""How far a build is: bars on a terminal, lines in a file or a pipe, where bars would come when all is done."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

EVERY = 60  # seconds


class Lines(Progress):
    """A line when a task is done, and until then from time to time."""

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        task, now = self._tasks[task_id], self.get_time()
        if task.completed == task.total or now - task.fields.get("told", task.start_time or 0.0) >= EVERY:
            task.fields["told"] = now
            self.console.print(self.make_tasks_table([task]))


def progress(console: Console) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    if console.is_terminal:
        return Progress(*columns, console=console)
    return Lines(*columns, console=console, disable=True)
