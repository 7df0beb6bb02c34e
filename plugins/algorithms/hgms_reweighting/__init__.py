"""Methods that weigh rows of the lower level by their losses or gradients."""
