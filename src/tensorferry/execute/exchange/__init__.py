"""What ranks of one machine read for each other."""

from tensorferry.execute.exchange.exchange import Exchange, Neighbour
from tensorferry.execute.exchange.rows import LEAST, Rows, SharedRows, need_of

__all__ = ["LEAST", "Exchange", "Neighbour", "Rows", "SharedRows", "need_of"]
