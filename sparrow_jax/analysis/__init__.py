"""Pictures and claims about alpha from finished files alone: the command `python -m sparrow_jax.analysis`.

`inputs` reads calibrations, runs and closed loops; `alphas`, `costs` and `drift` make the numbers of the pictures of
them, `pictures` draws those, `claims` judges the paper's statements by them.
"""
