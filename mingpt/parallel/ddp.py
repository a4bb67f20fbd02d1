"""DistributedDataParallel: each rank has the full model."""

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mingpt.config.schema import Config
from mingpt.distributed.context import DistributedContext
from mingpt.parallel.strategy import Strategy


class DDP(Strategy):
    """DistributedDataParallel: each rank has the full model, and gradients are averaged in buckets.

    Args:
        example: arguments of the model, for a pass before the first step
    """

    def __init__(
        self,
        model: nn.Module,
        context: DistributedContext,
        config: Config,
        precision: str,
        example: tuple[Tensor, ...],
    ) -> None:
        super().__init__(model, context, config, precision)
        self.loss_factor = context.world_size  # DDP averages over ranks
        self.ddp = DistributedDataParallel(
            model,
            process_group=context.group,
            bucket_cap_mb=config.distributed.bucket_cap_mb,
            gradient_as_bucket_view=True,
        )
        self.ddp.broadcast_buffers = False  # as its argument, it is deprecated
        self.model = self.ddp
        self._rebuild_buckets(model, example)
        context.exit_callbacks.append(self._release)

    def _rebuild_buckets(self, model: nn.Module, example: tuple[Tensor, ...]) -> None:
        """Makes DDP rebuild its buckets before the first step, by a backward pass whose gradients are discarded.

        DDP would rebuild them after the first step of each start. With three or more ranks, the layout of the buckets
        determines the last bits of each sum, so a resumed run would differ from an uninterrupted one.
        """
        buffers = [buffer.clone() for buffer in model.buffers()]
        with self.eager(), self.autocast():
            output, loss = self.ddp(*example)
            (output if loss is None else loss).sum().backward()
        self.check_gradients()
        self.ddp.zero_grad(set_to_none=True)
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)

    def set_gradient_sync(self, sync_gradients: bool) -> None:
        self.ddp.require_backward_grad_sync = sync_gradients  # like DDP.no_sync

    def _release(self) -> None:
        # The last owner of the process group destroys it. DDP's C++ part would do that while it holds the GIL, and
        # would wait forever for gloo's thread, which needs the GIL to free a tensor (torch 2.13).
        del self.model
        del self.ddp
