"""Write scikit-learn's handwritten digits as two .npz files, and the folder of a vision transformer for them.

    python examples/tasks/digits.py train.npz held-out.npz vit-digits

1,797 images of 8 x 8 pixels (Alpaydin and Kaynak, UCI repository, 1998), every fifth held out. The folder has
a config.json alone: its weights begin at random.
"""

import sys

import numpy as np
from sklearn.datasets import load_digits
from transformers import ViTConfig


def main() -> None:
    """Write files and folder."""
    train, held_out, folder = sys.argv[1:]
    pixels, digits = load_digits(return_X_y=True)
    images = np.round(pixels.reshape(-1, 8, 8) * 255 / 16).astype(np.uint8)
    is_held_out = np.arange(len(digits)) % 5 == 0
    for path, rows in ((train, ~is_held_out), (held_out, is_held_out)):
        np.savez(path, images=images[rows], labels=digits[rows])
        print(f"{path}: {int(rows.sum())} images")
    ViTConfig(
        architectures=["ViTForImageClassification"], num_labels=10,
        image_size=8, patch_size=2, num_channels=1, hidden_size=64,
        num_hidden_layers=6, num_attention_heads=4, intermediate_size=128,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ).save_pretrained(folder)  # fmt: skip
    print(f"{folder}: a transformer of 6 blocks")


if __name__ == "__main__":
    main()
