"""What ranks of one machine read for each other."""

from tensorferry.execute.exchange.exchange import Exchange, Party
from tensorferry.execute.exchange.neighbours import sharing, told_of
from tensorferry.execute.exchange.rows import LEAST, Rows, SharedRows, need_of, needs_little

__all__ = ["LEAST", "Exchange", "Party", "Rows", "SharedRows", "need_of", "needs_little", "sharing", "told_of"]
