"""What was handed over to the store is due for a commit until one has covered it, whatever was committed before."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvd.cache.hashing import Namespace
from kvd.storage.handover import Handover
from kvd.storage.node_index import NodeIndex

pytestmark = pytest.mark.store


def test_a_commit_covers_what_was_handed_over_before_it_alone():
    index, handed = NodeIndex(1000), []
    handover = Handover(index, SimpleNamespace(last_lsn=7))
    handover.store = SimpleNamespace(submit=handed.append)
    for number in range(2):
        index.add_namespace(Namespace(b"f" * 32, b"salt %d" % number))
        handover.send(commit=False)
    assert [changes.number for changes in handed] == [1, 2]
    handover.committed(1)
    assert handover.is_due, "the second set waits for a commit yet"
    handover.committed(2)
    assert not handover.is_due
