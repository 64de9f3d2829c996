"""Models of the transformers library: building them empty, and filling them by our plan.

Importing this imports torch; transformers itself is imported when a model is built or adapted.
"""

from __future__ import annotations

from tensorferry.compat.transformers.adapting import adapt
from tensorferry.compat.transformers.cluster import ClusterPlan, RankPlan, plan_cluster
from tensorferry.compat.transformers.loading import build_model, load_model

__all__ = ["ClusterPlan", "RankPlan", "adapt", "build_model", "load_model", "plan_cluster"]
