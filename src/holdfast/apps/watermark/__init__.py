"""Watermarks in the weights of a classifier that no small change of the weights removes, with a certificate."""

from holdfast.apps.watermark.adversaries import Drift, drift, epochs_to_leave, fine_tune, parameter_pgd
from holdfast.apps.watermark.attacks_toolbox import TOOLBOX
from holdfast.apps.watermark.certificate import (
    WatermarkCertificate,
    certify_watermark,
    noisy_accuracies,
    trigger_accuracy,
)
from holdfast.apps.watermark.embedding import EmbedOptions, embed
from holdfast.apps.watermark.ownership import Ownership, null_test, verify_black_box, verify_white_box
from holdfast.apps.watermark.removal import AttackLog, Criterion, Snapshot, removal_time
from holdfast.apps.watermark.triggers import (
    TriggerSet,
    abstract_images,
    content_triggers,
    load_triggers,
    noise_triggers,
    save_triggers,
    unrelated_triggers,
)

__all__ = [
    "TOOLBOX",
    "AttackLog",
    "Criterion",
    "Drift",
    "EmbedOptions",
    "Ownership",
    "Snapshot",
    "TriggerSet",
    "WatermarkCertificate",
    "abstract_images",
    "certify_watermark",
    "content_triggers",
    "drift",
    "embed",
    "epochs_to_leave",
    "fine_tune",
    "load_triggers",
    "noise_triggers",
    "noisy_accuracies",
    "null_test",
    "parameter_pgd",
    "removal_time",
    "save_triggers",
    "trigger_accuracy",
    "unrelated_triggers",
    "verify_black_box",
    "verify_white_box",
]
