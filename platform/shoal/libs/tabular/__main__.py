"""`python -m shoal.libs.tabular FILE CLASS`: fits gradient-boosted trees to the rows in FILE, and prints their score.

Started by `trees`, which ends it. CLASS: of scikit-learn's `ensemble`.
"""

from __future__ import annotations

import sys

import numpy as np
from sklearn import ensemble

if __name__ == "__main__":
    rows = np.load(sys.argv[1])
    trees = getattr(ensemble, sys.argv[2])(random_state=0, categorical_features=rows["is_word"])
    score = trees.fit(rows["train"], rows["train_y"]).score(rows["validation"], rows["validation_y"])
    sys.stdout.write(f"{score}\n")
