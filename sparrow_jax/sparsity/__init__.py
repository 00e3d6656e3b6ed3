"""How sparse the sampler is, and how far that takes it from the dense policy: pure functions, no models and no state.

Page selection itself is a kernel (`pallas_kernels.page_select`); here stand the budgets it is given and the
statistics of the outcome.
"""
