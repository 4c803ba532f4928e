"""What the start says of itself: each part as it goes on, never more often than anybody could read it."""

from __future__ import annotations

from kvd.engine.start_progress import StartProgress


class Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def unix(self) -> float:
        return self.now_s


def test_weights_and_blocks_are_told_side_by_side():
    told: list[str] = []
    published: list[str] = []
    clock = Clock()
    progress = StartProgress(told.append, lambda: published.append(progress.text), clock)
    assert progress.text == ""
    progress.on_weights("loading weights: 40 %")
    progress.on_weights("loading weights: 40 %")
    assert published == ["loading weights: 40 %"]
    for done in range(1, 9):
        progress.on_blocks(done, 10)
    clock.now_s += 1.0
    progress.on_blocks(9, 10)
    progress.on_weights("loading weights: 41 %")
    progress.blocks_are_back()
    assert published[1:] == [
        "loading weights: 40 %; rehydrating: 1 of 10 blocks",
        "loading weights: 40 %; rehydrating: 9 of 10 blocks",
        "loading weights: 41 %; rehydrating: 9 of 10 blocks",
        "loading weights: 41 %",
    ]
    assert len(told) == 2 + 9 + 1, "the service manager hears each; how often it is told is its own affair"
