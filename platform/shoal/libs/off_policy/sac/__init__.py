"""SAC with an automatic temperature and twin critics (Haarnoja et al., 1812.05905), for actions of a Box."""
