"""The fused head whose first product ends in scaled exponentials."""
