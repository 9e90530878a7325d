"""What the RoFormer paper claims, tried on real text: one folder for each experiment."""
