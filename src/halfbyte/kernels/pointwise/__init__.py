"""What stands between the products of a decoding step, where no product does it in its own launch."""
