"""The cache of generation."""

from torch import Tensor


class KVCache:
    """Keys and values of the tokens that generation has passed through the model.

    Args:
        size: maximum number of tokens
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.length = 0  # tokens so far; only these positions are valid
        self.keys_values: list[Tensor] = []  # of each attention layer, in the order of their calls, (2, B, H, size, D)
        self.next = 0  # the layer that is called next

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Appends keys and values of new tokens, (B, H, T, D), and returns all, (B, H, length + T, D)."""
        if self.next == len(self.keys_values):
            B, H, _, D = keys.shape
            self.keys_values.append(keys.new_empty(2, B, H, self.size, D))
        cached = self.keys_values[self.next]
        self.next += 1
        end = self.length + keys.size(2)
        cached[0, :, :, self.length : end] = keys
        cached[1, :, :, self.length : end] = values
        return cached[0, :, :, :end], cached[1, :, :, :end]

    def end_pass(self, num_tokens: int) -> None:
        """Counts the new tokens after all layers have been called."""
        self.length += num_tokens
        self.next = 0
