{{- define "headrace.labels" -}}
{app.kubernetes.io/name: headrace, app.kubernetes.io/instance: {{ .Release.Name | quote }}}
{{- end -}}
