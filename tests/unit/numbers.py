"""A dataloader for tests of what is read."""


class Numbers:
    """A dataloader of consecutive numbers, from any of them on."""

    def __init__(self, end=None):
        self.next, self.end = 0, end

    def __iter__(self):
        while self.next != self.end:
            self.next += 1
            yield self.next - 1

    def state_dict(self):
        return self.next

    def load_state_dict(self, state):
        self.next = state
