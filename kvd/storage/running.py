"""What works on the store's behalf while the engine runs, put together once: log, planner, copies, storage thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvd.config import StorageConfig
from kvd.storage.budget import Budget, PlannerLimits
from kvd.storage.cold_tier import ColdTier
from kvd.storage.copy_out import CopyOut, CopyRequests
from kvd.storage.governor import Governor
from kvd.storage.hot_blocks import WritePolicy
from kvd.storage.load_cost import LoadCost
from kvd.storage.node_index import NodeIndex
from kvd.storage.planner import Planner
from kvd.storage.ports import BlockIO, Clock, Leases, Log, StorageInbox
from kvd.storage.recovery import WAL_NAME, Recovered, load_index
from kvd.storage.staging import StagingPool
from kvd.storage.store import Store
from kvd.storage.store_thread import StoreThread
from kvd.types import KvGroup
from kvd.wal.writer import WalWriter

_NUM_STAGING_BUFFERS = 4
_NUM_COLD_BUFFERS = 8
_COLD_BUFFER_BYTES = 2 << 20
"""Small, so that the first bytes of a load reach the pool while the next are read; all of them together are what is handed over between two steps."""
_WAL_QUEUE_CAPACITY = 65536


@dataclass(slots=True, kw_only=True)
class Running:
    """What works on the store's behalf once the engine runs."""

    recovered: Recovered
    budget: Budget
    staging: StagingPool
    wal: WalWriter
    governor: Governor
    copy_out: CopyOut
    planner: Planner
    store: StoreThread
    cold_tier: ColdTier | None


def assemble(
    config: StorageConfig,
    recovered: Recovered,
    budget: Budget,
    *,
    groups: Sequence[KvGroup],
    block_size_tokens: int,
    inbox: StorageInbox,
    leases: Leases,
    block_io: BlockIO,
    clock: Clock,
    log: Log,
) -> Running:
    """The parts, connected and not yet started."""
    staging = StagingPool(
        groups, buffer_bytes=config.checkpoint_bytes_per_step, num_buffers=_NUM_STAGING_BUFFERS, allocate=block_io.host_memory
    )
    wal = WalWriter(
        config.state_dir / WAL_NAME,
        recovered.log_position(),
        store_uuid=recovered.generations.current.store_uuid,
        seal=recovered.generations.codec.wal_seal(recovered.generations.current.store_uuid),
        sync_interval_s=config.wal_sync_interval_ms / 1e3,
        unsynced_max_s=config.unsynced_max_s,
        segment_bytes=budget.wal_segment_bytes,
        max_bytes=budget.wal_max_bytes,
        queue_capacity=_WAL_QUEUE_CAPACITY,
        on_error=lambda error: log.error("wal.failed", error=error),
        on_recovered=lambda: log.info("wal.resumed"),
    )
    if recovered.applied_lsn >= recovered.log.last_lsn:
        wal.retire(recovered.applied_lsn)
    burst = staging.max_blocks * max(1, sum(group.row_bytes for group in groups))
    governor = Governor(
        bytes_per_s=config.checkpoint_bytes_per_s,
        burst_bytes=burst,
        pause_queue_depth=config.checkpoint_pause_queue_depth,
        clock=clock,
    )
    requests = CopyRequests()
    limits = PlannerLimits(
        checkpoint_interval_s=config.checkpoint_interval_s,
        wal_soft_bytes=budget.wal_max_bytes // 2,
        max_block_bytes=budget.max_block_bytes,
        max_nodes=budget.max_nodes,
        max_wanted=2 * _NUM_STAGING_BUFFERS * staging.max_blocks,
        block_bytes=budget.block_bytes,
        write_policy=WritePolicy(config.write_policy),
        write_dwell_s=config.write_dwell_s,
    )
    planner = Planner(
        index=recovered.index,
        wal=wal,
        requests=requests,
        governor=governor,
        codec=recovered.generations.codec,
        inbox=inbox,
        limits=limits,
        clock=clock,
        log=log,
    )

    def read_late(store: Store) -> NodeIndex:
        found = NodeIndex(budget.block_bytes, uses_half_life_s=config.uses_half_life_s, now_unix_s=int(clock.unix()))
        load_index(found, store, groups)
        return found

    store = StoreThread(
        recovered.generations,
        recovered.store,
        groups=groups,
        staging=staging,
        commit_bytes=budget.commit_bytes,
        clock=clock,
        on_result=planner.on_result,
        read_late=read_late if recovered.is_unread else None,
    )
    copy_out = CopyOut(
        requests,
        leases=leases,
        block_io=block_io,
        groups=groups,
        staging=staging,
        governor=governor,
        on_staged=store.stage,
        on_returned=planner.returned,
    )
    cold_tier = None
    if config.cold_tier != "never":
        buffer_bytes = min(_COLD_BUFFER_BYTES, config.checkpoint_bytes_per_step)
        cold_tier = ColdTier(
            index=recovered.index,
            store=store,
            planner=planner,
            wal=wal,
            cost=LoadCost(sum(group.row_bytes for group in groups), block_size_tokens, always=config.cold_tier == "always"),
            groups=groups,
            staging=StagingPool(groups, buffer_bytes=buffer_bytes, num_buffers=_NUM_COLD_BUFFERS, allocate=block_io.host_memory),
            block_io=block_io,
            inbox=inbox,
            clock=clock,
            log=log,
            timeout_s=config.cold_tier_timeout_s,
        )
    return Running(
        recovered=recovered,
        budget=budget,
        staging=staging,
        wal=wal,
        governor=governor,
        copy_out=copy_out,
        planner=planner,
        store=store,
        cold_tier=cold_tier,
    )
