{{/* An object of base/ as one of this release: its namespace, its label. Takes root and object. */}}
{{- define "tessera.object" -}}
{{- $name := dict "app.kubernetes.io/name" .root.Release.Name -}}
{{- $_ := set .object.metadata "namespace" .root.Release.Namespace -}}
{{- $_ := set .object.metadata "name" (.object.metadata.name | replace "tessera" .root.Release.Name) -}}
{{- $_ := set .object.metadata "labels" (merge $name (default dict .object.metadata.labels)) -}}
{{- toYaml .object -}}
{{- end -}}
{{/* The labels by which everything finds the pods of this release. */}}
{{- define "tessera.pods" -}}
{{- dict "matchLabels" (dict "app.kubernetes.io/name" .Release.Name) | toYaml -}}
{{- end -}}
{{- define "tessera.claim" -}}
{{- default (printf "%s-model" .Release.Name) .Values.model.claim -}}
{{- end -}}
